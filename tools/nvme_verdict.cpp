// From measured speeds to what they mean for the models that were asked for.
#include <algorithm>
#include <array>
#include <cmath>
#include <sstream>

#include "terrace/error.h"
#include "tools/nvme_bench.h"

namespace terrace::cli {
namespace {

using bench::Pattern;

constexpr std::array kUsualModels{"1B", "7B", "13B", "70B"};

// What a cell's repeats leave open.
bench::Interval interval_of(const DriveResult& drive, Pattern pattern) {
  return bench::median_interval(drive.of(pattern)->gb_s);
}

enum class Limit : std::uint8_t { lower, median, upper };  // of the speeds' intervals

// Of one drive, on the average over all, and as all of them scale.
bench::DriveSpeeds speeds_of(const BenchResult& result, Limit limit) {
  const auto speed = [limit](const DriveResult& drive, Pattern pattern) {
    const auto interval = interval_of(drive, pattern);
    if (limit == Limit::lower) return interval.low;
    return limit == Limit::upper ? interval.high : drive.of(pattern)->median_gb_s();
  };
  bench::DriveSpeeds sum;
  for (const auto& drive : result.drives) {
    const double write = drive.of(Pattern::overwrite)->median_gb_s();
    sum.read_gb_s += speed(drive, Pattern::read);
    sum.write_gb_s += lasting_write_gb_s(drive) * speed(drive, Pattern::overwrite) / write;
    sum.optimizer_gb_s += speed(drive, Pattern::optimizer_step);
  }
  const auto count = static_cast<double>(result.drives.size());
  const auto share = [&](const bench::Scaling& scaling) {
    return scaling.alone_gb_s > 0 ? std::min(1.0, scaling.share()) : 1.0;
  };
  const double read = result.together ? share(result.together->read) : 1.0;
  const double write = result.together ? share(result.together->write) : 1.0;
  return {sum.read_gb_s / count * read, sum.write_gb_s / count * write,
          sum.optimizer_gb_s / count * std::min(read, write)};
}

// Of what the maker rated, what the drive has not used up yet.
double endurance_left(double rated, const BenchResult& result) {
  int used = 0;
  for (const auto& drive : result.drives) {
    if (drive.facts.wear) used = std::max(used, drive.facts.wear->percentage_used);
  }
  return rated * std::max(0.0, 1 - used / 100.0);
}

std::vector<std::string> models_of(const BenchOptions& options) {
  std::vector<std::string> models;
  for (const auto& list : {options.model, options.parameters}) {
    std::istringstream names(list);
    for (std::string name; std::getline(names, name, ',');) models.push_back(name);
  }
  if (models.empty()) models.assign(kUsualModels.begin(), kUsualModels.end());
  return models;
}

}  // namespace

double lasting_write_gb_s(const DriveResult& drive) {
  const double write = drive.of(Pattern::overwrite)->median_gb_s();
  if (!drive.cliff) return write;
  return std::min(write, drive.cliff->found ? drive.cliff->after_gb_s : drive.cliff->mean_gb_s);
}

void add_verdict(const BenchOptions& options, BenchResult& result) {
  const auto models = models_of(options);
  std::vector<double> parameters;
  for (const auto& name : models) parameters.push_back(bench::parse_parameters(name.c_str()));
  if (result.drives.empty()) return;
  for (const auto& drive : result.drives) {
    if (drive.measured && !drive.read_only) continue;
    result.no_verdict = drive.directory + (drive.measured ? " is a file: only reads were measured"
                                                          : " could not be measured");
    return;
  }
  const auto speeds = speeds_of(result, Limit::median);
  const auto low = speeds_of(result, Limit::lower);
  const auto high = speeds_of(result, Limit::upper);
  if (!(low.read_gb_s > 0 && low.write_gb_s > 0 && low.optimizer_gb_s > 0)) {
    result.no_verdict = "too noisy: a speed was zero at times";
    return;
  }
  result.speeds = speeds;
  bench::TrainingQuestion question;
  question.compute_seconds = result.compute_seconds;
  question.drives = static_cast<double>(result.drives.size());
  if (result.rated_bytes) question.rated_bytes = endurance_left(*result.rated_bytes, result);
  double free = 0;
  for (const auto& drive : result.drives) free += static_cast<double>(drive.facts.free.count);
  for (std::size_t i = 0; i < models.size(); ++i) {
    question.parameters = parameters[i];
    ModelVerdict model{models[i], parameters[i], bench::judge(speeds, question), false, {}};
    model.too_noisy = bench::judge(low, question).hides != bench::judge(high, question).hides;
    model.fits = model.verdict.stored_bytes <= free;
    result.verdicts.push_back(std::move(model));
  }
}

}  // namespace terrace::cli
