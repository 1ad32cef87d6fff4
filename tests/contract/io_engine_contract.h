// The I/O engines under contract, and what their tests share. A new one joins io_engine_kinds().
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <ostream>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "nvme/simulation.h"
#include "terrace/error.h"
#include "terrace/io_engine.h"

namespace terrace {

inline constexpr std::uint64_t kPage = 4096;

struct IoEngineCase {
  std::string name;
  IoEngineOptions options;
  bool real_files = true;
  std::unique_ptr<IoEngine> (*wrap)(std::unique_ptr<IoEngine>) = nullptr;

  std::unique_ptr<IoEngine> make() const {
    auto engine = make_io_engine(options);
    return wrap != nullptr ? wrap(std::move(engine)) : std::move(engine);
  }

  friend void PrintTo(const IoEngineCase& engine, std::ostream* stream) { *stream << engine.name; }
};

// Small blocks, few slots, two drives, so that ordinary requests are split and have to queue.
inline IoEngineOptions io_options(IoEngineKind kind, Throttle throttle = {}) {
  IoEngineOptions options;
  options.kind = kind;
  options.drives = 2;
  options.queue_depth = 4;
  options.block = 64_KiB;
  options.threads = 2;
  options.read = options.write = throttle;
  return options;
}

inline std::vector<IoEngineCase> io_engine_kinds() {
  const auto without_faults = [](std::unique_ptr<IoEngine> engine) {
    return make_fault_engine(std::move(engine), {});
  };
  const auto on_simulated_disk = [](std::unique_ptr<IoEngine>) {
    const SimulatedDiskOptions shuffled{.seed = std::random_device{}()};
    return make_memory_engine(std::make_shared<SimulatedDisk>(shuffled), 2);
  };
  return {
      {"io_uring", io_options(IoEngineKind::io_uring)},
      {"threads", io_options(IoEngineKind::threads)},
      {"memory", io_options(IoEngineKind::memory), false},
      {"throttled", io_options(IoEngineKind::threads, {.gb_s = 4, .latency_us = 10})},
      {"faults", io_options(IoEngineKind::threads), true, without_faults},
      {"simulated_disk", io_options(IoEngineKind::memory), false, on_simulated_disk},
  };
}

inline std::string io_engine_name(const testing::TestParamInfo<IoEngineCase>& info) {
  return info.param.name;
}

// Bytes at a page boundary, from the heap, so that a sanitizer sees every use after free.
class PageBuffer {
 public:
  explicit PageBuffer(std::size_t size) : bytes_(size + kPage) {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    span_ = std::span(bytes_).subspan(round_up(address, kPage) - address, size);
  }
  std::byte* data() const { return span_.data(); }
  std::span<std::byte> span() const { return span_; }

 private:
  std::vector<std::byte> bytes_;
  std::span<std::byte> span_;
};

inline void fill(std::span<std::byte> bytes, std::mt19937_64& random) {
  for (auto& byte : bytes) byte = static_cast<std::byte>(random());
}

// A directory below the current one that is removed with everything in it.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = "terrace_test_XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    path_ = std::filesystem::absolute(pattern);
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

class IoEngineContract : public testing::TestWithParam<IoEngineCase> {
 protected:
  void SetUp() override {
    try {
      engine_ = GetParam().make();
    } catch (const Error& error) {
      if (error.code() != ErrorCode::unavailable) throw;
      GTEST_SKIP() << error.what();
    }
  }

  FileId open(Bytes size, const std::string& name = "file") {
    return engine_->open({.path = directory_ / name, .size = size});
  }
  FileId open_existing(const std::string& name) {
    return engine_->open({.path = directory_ / name, .mode = IoFileMode::existing});
  }

  // Expects that `task` fails with `code` and a message that names every one of `parts`.
  template <class Task>
  void expect_error(ErrorCode code, const std::vector<std::string>& parts, Task task) {
    try {
      task();
      ADD_FAILURE() << "nothing was refused";
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_EQ(error.code(), code) << text;
      for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }

  // Reaps until nothing is pending; each ticket once, with times that make sense.
  std::map<std::uint64_t, Completion> drain() {
    std::map<std::uint64_t, Completion> result;
    while (engine_->pending() > 0) reap_into(result);
    std::vector<Completion> rest;
    EXPECT_EQ(engine_->reap(rest, Nanoseconds{0}), 0u);
    return result;
  }

  void reap_into(std::map<std::uint64_t, Completion>& result) {
    std::vector<Completion> reaped;
    const auto before = engine_->pending();
    const auto count = engine_->reap(reaped, std::chrono::seconds(20));
    ASSERT_GT(count, 0u) << "nothing completed in 20 s; " << before << " pending";
    EXPECT_EQ(count, reaped.size());
    EXPECT_EQ(engine_->pending(), before - count);
    for (const auto& completion : reaped) {
      EXPECT_TRUE(result.emplace(completion.ticket.value, completion).second)
          << "ticket " << completion.ticket.value << " completed twice";
      EXPECT_LE(completion.start, completion.end);
      EXPECT_LE(completion.end, steady_clock().now());
    }
  }

  // One request, alone, to its end.
  Completion run(IoOperation operation, FileId file, std::uint64_t offset, std::byte* data,
                 std::uint64_t bytes) {
    EXPECT_TRUE(engine_->submit({{7}, operation, file, offset, data, bytes}));
    EXPECT_EQ(engine_->pending(), 1u);
    const auto completions = drain();
    EXPECT_EQ(completions.count(7), 1u);
    return completions.begin()->second;
  }

  TemporaryDirectory directory_;
  std::unique_ptr<IoEngine> engine_;
};

}  // namespace terrace
