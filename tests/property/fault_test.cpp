// Every operation of a run fails in turn, in every way: the run ends with an error that says what
// and where, or goes on to the exact end; and what it leaves can be continued to the exact end.
#include <gtest/gtest.h>

#include <cstring>

#include "nvme/store_files.h"
#include "nvme/store_inspect.h"
#include "tests/support/store_run.h"

namespace terrace {
namespace {

constexpr double kTimeout = 0.03;  // seconds until a lost operation is given up
constexpr Nanoseconds kLate = std::chrono::milliseconds(90);

struct Fault {
  const char* name;
  FaultKind kind;
  int error;
};
constexpr Fault kFaults[] = {
    {"EIO", FaultKind::error, EIO},
    {"ENOSPC", FaultKind::error, ENOSPC},
    {"EDQUOT", FaultKind::error, EDQUOT},
    {"EFBIG", FaultKind::error, EFBIG},
    {"EINVAL", FaultKind::error, EINVAL},
    {"AfterTheMove", FaultKind::error_after_move, EIO},
    {"Short", FaultKind::short_completion, EIO},
    {"Lost", FaultKind::lost, EIO},
};

// An engine whose n-th request ends `kLate` after it was given.
class LateEngine final : public ForwardingEngine {
 public:
  LateEngine(std::unique_ptr<IoEngine> engine, std::uint64_t at)
      : ForwardingEngine(std::move(engine)), at_(at) {}

  bool submit(const IoRequest& request) override {
    if (count_ + 1 != at_) {
      if (!engine_->submit(request)) return false;
    } else {
      held_ = request;
      until_ = steady_clock().now() + kLate;
    }
    ++count_;
    return true;
  }
  std::size_t pending() const override { return engine_->pending() + (held_ ? 1 : 0); }
  std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) override {
    const auto left = std::max(Nanoseconds{0}, until_ - steady_clock().now());
    if (held_ && left.count() == 0 && engine_->submit(*held_)) held_.reset();
    return engine_->reap(completions, held_ ? std::min(left, timeout) : timeout);
  }

 private:
  const std::uint64_t at_;
  std::uint64_t count_ = 0;
  std::optional<IoRequest> held_;
  Nanoseconds until_{0};
};

class Faults : public testing::TestWithParam<std::tuple<Fault, bool>> {
 protected:
  Faults() : seed_(fresh_seed()) {
    std::printf("%s, %s\n", fault().name, persistent() ? "persistent" : "once");
  }

  Fault fault() const { return std::get<0>(GetParam()); }
  bool persistent() const { return std::get<1>(GetParam()); }

  struct Case {
    States states = States::nvme;
    std::uint64_t steps = 2;
    std::uint64_t resume_at = 0;
    std::uint64_t commit_after = 0;  // nothing is committed but on request, and unchecked
    bool two_drives = false;
    double clip = 0;
  };

  Course course(const Case& what, std::uint64_t steps) const {
    std::vector<std::string> directories{directory_.path()};
    if (what.two_drives) directories.push_back(second_.path());
    Config config = small_config(directories, what.states);
    if (fault().kind == FaultKind::lost) config.store.timeout_seconds = kTimeout;
    config.gradient_clipping = what.clip;
    if (what.commit_after > 0) {
      config.store.commit_interval = 100;
      config.store.checksums = false;
    }
    return {small_mlp(), config, steps};
  }

  static Observed run_on(const std::shared_ptr<SimulatedDisk>& disk, const Course& course,
                         const FaultPlan& plan, const std::shared_ptr<TapState>& tap,
                         std::uint64_t commit_after = 0) {
    return run(course,
               [=]() -> std::unique_ptr<IoEngine> {
                 auto engine = make_fault_engine(make_memory_engine(disk), plan);
                 return std::make_unique<TapEngine>(std::move(engine), tap, Spoil{});
               },
               {.drain = false, .compare = plan.at == 0, .commit_after = commit_after});
  }

  // A segment's bytes, which can go elsewhere or be written again.
  static bool writes_data(const TappedCall& call, const StoreFileLayout& layout) {
    return call.call == IoCall::write &&
           (!call.path.ends_with("terrace.store") || call.offset >= layout.slot[0].count);
  }

  // The error says what failed, where and why.
  void expect_named(const Error& error, const TappedCall& struck) const {
    const std::string said = error.what();
    const auto has = [&](const std::string& part) {
      EXPECT_NE(said.find(part), std::string::npos) << "'" << part << "' is missing: " << said;
    };
    EXPECT_EQ(error.code(), ErrorCode::io) << said;
    const bool names = struck.call == IoCall::open || struck.call == IoCall::remove;
    const bool lost = fault().kind == FaultKind::lost && !names;
    if (said.find("cut short") == std::string::npos) {
      has(std::strerror(lost ? ETIMEDOUT : fault().error));
    }
    if (persistent() || names) {
      // The last attempt may be elsewhere.
      has(persistent() ? std::filesystem::current_path().string() + "/fault-" : struck.path);
    } else {
      has(std::to_string(struck.bytes) + " bytes at offset " + std::to_string(struck.offset) +
          " of " + struck.path);
    }
  }

  // What the run has left is continued to the exact end: by another process, and after the power
  // went, which a flush that was told done and did nothing does not survive.
  void expect_continued(const std::shared_ptr<SimulatedDisk>& disk, const Course& course,
                        std::uint64_t least, std::uint64_t most, std::uint64_t seed) const {
    for (const auto& directory : {directory_.path(), second_.path()}) {
      std::filesystem::remove(directory + "/terrace.lock");
    }
    if (fault().kind != FaultKind::short_completion) disk->restart(seed);
    const auto next = run_on(disk, course, {}, std::make_shared<TapState>());
    EXPECT_FALSE(next.error.has_value()) << next.error->what();
    EXPECT_EQ(next.wrong, "");
    EXPECT_GE(next.resumed.value_or(0), least);
    EXPECT_LE(next.resumed.value_or(0), most);
  }

  // False: the run was over before its n-th call.
  bool fail_at(std::uint64_t n, const Case& what, const Course& course,
               const SimulatedDisk& prepared) {
    SCOPED_TRACE("seed " + std::to_string(seed_) + ", call " + std::to_string(n));
    const auto disk = prepared.copy();
    const auto tap = std::make_shared<TapState>();
    const auto begin = steady_clock().now();
    const FaultPlan plan{.at = n, .kind = fault().kind, .error = fault().error,
                         .persistent = persistent()};
    const auto seen = run_on(disk, course, plan, tap, what.commit_after);
    longest_ = std::max(longest_, steady_clock().now() - begin);
    if (tap->calls.size() < n) {
      EXPECT_FALSE(seen.error.has_value());
      return false;
    }
    const auto struck = tap->calls[n - 1];
    if (seen.error) ++errors_;
    if (seen.error) expect_named(*seen.error, struck);
    if (!persistent() && fault().kind != FaultKind::lost && writes_data(struck, layout_)) {
      EXPECT_FALSE(seen.error.has_value()) << seen.error->what();
      ++went_on_;
    }
    const auto least =
        last_committed(course, {.commit_after = what.commit_after}, seen, tap->flushes);
    expect_continued(disk, course, std::max(what.resume_at, least),
                     std::max(what.resume_at, seen.finishing), seed_ + n);
    return !testing::Test::HasFailure();
  }

  void fail_everywhere(const Case& what) {
    const auto disk = std::make_shared<SimulatedDisk>(SimulatedDiskOptions{.seed = seed_});
    const auto all = course(what, what.steps);
    const auto whole = run_on(disk->copy(), all, {}, std::make_shared<TapState>());
    ASSERT_FALSE(whole.error.has_value()) << whole.error->what();
    learn_layout(what);
    if (what.resume_at > 0) {
      run_on(disk, course(what, what.resume_at), {}, std::make_shared<TapState>());
    }
    std::uint64_t n = 1;
    while (fail_at(n, what, all, *disk)) ++n;
    std::printf("%llu calls failed: %llu errors, %llu data writes went on; at most %f s\n",
                static_cast<unsigned long long>(n - 1), static_cast<unsigned long long>(errors_),
                static_cast<unsigned long long>(went_on_), to_seconds(longest_));
  }

  void learn_layout(const Case& what) {
    const auto disk = std::make_shared<SimulatedDisk>();
    run_on(disk, course(what, 1), {}, std::make_shared<TapState>());
    const auto engine = make_memory_engine(disk);
    layout_ = inspect_store(*engine, engine->open({.path = store_path(directory_.path()),
                                                   .mode = IoFileMode::existing}))
                  .layout;
  }

  const Directory directory_{"fault-a"};
  const Directory second_{"fault-b"};
  const std::uint64_t seed_;
  StoreFileLayout layout_;
  Nanoseconds longest_{0};
  std::uint64_t errors_ = 0;
  std::uint64_t went_on_ = 0;
};

TEST_P(Faults, OfANewStore) { fail_everywhere({}); }

TEST_P(Faults, OfAResumedStore) {
  fail_everywhere({.states = States::both, .steps = 3, .resume_at = 1});
}

// A trainer that goes on after a commit failed must not spoil what that commit may have made.
TEST_P(Faults, OfACommitOnRequest) {
  fail_everywhere({.states = States::both, .steps = 3, .commit_after = 1});
}

std::string name_of(const testing::TestParamInfo<std::tuple<Fault, bool>>& which) {
  return std::string(std::get<0>(which.param).name) +
         (std::get<1>(which.param) ? "ForEver" : "Once");
}

class FaultsOfTwoDrives : public Faults {};

TEST_P(FaultsOfTwoDrives, OfANewStore) { fail_everywhere({.steps = 2, .two_drives = true}); }

// Updates, and the commits of them, are made in the next step.
class FaultsOfDeferredUpdates : public Faults {};

TEST_P(FaultsOfDeferredUpdates, OfAResumedStore) {
  fail_everywhere({.states = States::both, .steps = 3, .resume_at = 1, .clip = kSmallNorm});
}

TEST_P(FaultsOfDeferredUpdates, OfACommitOnRequest) {
  fail_everywhere({.states = States::both, .steps = 3, .commit_after = 1, .clip = kSmallNorm});
}

INSTANTIATE_TEST_SUITE_P(Kinds, FaultsOfDeferredUpdates,
                         testing::Combine(testing::Values(kFaults[0], kFaults[5]),
                                          testing::Bool()),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Kinds, FaultsOfTwoDrives,
                         testing::Combine(testing::Values(kFaults[0], kFaults[5], kFaults[7]),
                                          testing::Values(false)),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Kinds, Faults,
                         testing::Combine(testing::ValuesIn(kFaults), testing::Bool()),
                         name_of);

// What was given up may end all the same: nobody is surprised, and nothing was freed.
TEST(LateOperation, IsGivenUpOnce) {
  const Directory directory("late");
  Config config = small_config({directory.path()}, States::both);
  config.store.timeout_seconds = kTimeout;
  const Course course(small_mlp(), config, 2);
  std::uint64_t given_up = 0;
  for (std::uint64_t n = 1;; ++n) {
    SCOPED_TRACE("request " + std::to_string(n));
    const auto disk = std::make_shared<SimulatedDisk>();
    const auto tap = std::make_shared<TapState>();
    const auto seen = run(
        course,
        [&]() -> std::unique_ptr<IoEngine> {
          auto late = std::make_unique<LateEngine>(make_memory_engine(disk), n);
          return std::make_unique<TapEngine>(std::move(late), tap, Spoil{});
        },
        {.drain = false, .compare = false, .linger = 2 * kLate});
    ASSERT_EQ(seen.wrong, "");
    if (!seen.error) break;
    ++given_up;
    EXPECT_NE(std::string(seen.error->what()).find(std::strerror(ETIMEDOUT)), std::string::npos);
    std::filesystem::remove(directory.path() + "/terrace.lock");
    const auto next = run(course, [&] { return make_memory_engine(disk); }, {});
    ASSERT_FALSE(next.error.has_value()) << next.error->what();
    ASSERT_EQ(next.wrong, "");
  }
  EXPECT_GT(given_up, 50U);
}

}  // namespace
}  // namespace terrace

// What an operation that never ends may still touch is left to it.
extern "C" const char* __lsan_default_suppressions() {  // NOLINT
  return "leak:terrace::ExecutorThread::loop\nleak:terrace::EngineImpl::EngineImpl\n";
}
