#include "tools/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "tools/report.h"

namespace terrace::cli {
namespace {

constexpr std::uint64_t kBarWidth = 24;
constexpr std::uint64_t kPlainLines = 20;  // over a whole run, and
constexpr double kPlainSeconds = 60;       // between two of them at most

}  // namespace

Progress::Progress(std::uint64_t steps, std::uint64_t tokens_per_step, std::uint64_t before)
    : steps_(steps),
      tokens_(tokens_per_step),
      before_steps_(before),
      terminal_(::isatty(STDOUT_FILENO) != 0) {}

// GB/s of every lane over the step.
std::string Progress::lanes(const EngineStats& stats, double seconds) {
  std::string text;
  for (const Lane lane : kLanes) {
    if (lane == Lane::compute || lane == Lane::commit) continue;
    static constexpr const char* kShort[] = {"rd", "wr", "up", "dn", "adam"};
    const auto moved = at(stats.lanes, lane).bytes - at(before_, lane).bytes;
    text += fmt::format(" {} {:.2f}", kShort[static_cast<std::size_t>(lane)],
                        static_cast<double>(moved.count) / seconds / 1e9);
  }
  before_ = stats.lanes;
  return text;
}

void Progress::tell(const std::string& text) const {
  fmt::print("{}{}\n", terminal_ ? "\r\x1b[K" : "", text);
  std::fflush(stdout);
}

void Progress::show(const FinishedStep& done, const EngineStats& stats) {
  const auto& [step, loss, seconds, norm, scale] = done;
  spent_ += seconds;
  const double mean = spent_ / static_cast<double>(step - before_steps_);
  const double left = mean * static_cast<double>(steps_ - step);
  const auto speeds = lanes(stats, seconds);
  std::string gradients;
  if (norm) gradients += fmt::format("  norm {:.3g}", *norm);
  if (scale) gradients += fmt::format("  scale {}", *scale);
  const double rate = static_cast<double>(tokens_) / seconds;
  if (terminal_) {
    const auto filled = step * kBarWidth / steps_;
    fmt::print("\r[{}{}] {}/{}  {:.3f} bits/byte{}  {:.0f} tok/s  GB/s{}  {} left \x1b[K",
               std::string(filled, '#'), std::string(kBarWidth - filled, '.'), step, steps_, loss,
               gradients, rate, speeds, duration_text(left));
    std::fflush(stdout);
    return;
  }
  const std::uint64_t every = std::max<std::uint64_t>(1, steps_ / kPlainLines);
  const bool due = step % every == 0 || spent_ - told_at_ >= kPlainSeconds;
  if (!due && step != before_steps_ + 1 && step != steps_) return;
  told_at_ = spent_;
  fmt::print("step {}/{}  loss {:.3f} bits/byte{}  {:.0f} tokens/s  GB/s{}  {} left\n", step,
             steps_, loss, gradients, rate, speeds, duration_text(left));
  std::fflush(stdout);
}

void Progress::end() {
  if (terminal_) fmt::print("\n");
}

}  // namespace terrace::cli
