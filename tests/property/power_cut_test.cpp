// The power goes at every operation of a run: what is found afterwards is a committed step, to the
// bit, and training goes on from there to the same end.
#include <gtest/gtest.h>

#include "nvme/store_files.h"
#include "nvme/store_inspect.h"
#include "tests/support/store_run.h"

namespace terrace {
namespace {

struct Case {
  std::vector<std::string> directories;
  States states = States::nvme;
  std::uint64_t steps = 3;
  std::uint64_t interval = 1;
  bool checksums = true;
  std::uint64_t resume_at = 0;  // the run that is cut begins with a store of this step
  FaultPlan fault{};            // of that run
  Spoil spoil{};                // of all runs
  std::uint64_t commit_after = 0;  // see RunOptions
  std::uint64_t seeds = 3;      // of what a cut leaves of unflushed writes
  double clip = 0;              // updates are made in the next step
};

struct Bounds {
  std::uint64_t least = 0;
  std::uint64_t most = 0;
};

struct Sweep {
  std::uint64_t cuts = 0;
  std::uint64_t judged = 0;
  std::map<std::uint64_t, std::uint64_t> resumed;  // how often, by step
  std::vector<std::string> broken;
};

class PowerCut : public testing::Test {
 protected:
  PowerCut() : seed_(fresh_seed()) {}

  std::vector<std::string> one() const { return {first_.path()}; }
  std::vector<std::string> two() const { return {first_.path(), second_.path()}; }

  static Course course(const Case& what) {
    Config config = small_config(what.directories, what.states);
    config.store.commit_interval = what.interval;
    config.store.checksums = what.checksums;
    config.gradient_clipping = what.clip;
    return {small_mlp(), config, what.steps};
  }

  IoFactory tapped(std::shared_ptr<SimulatedDisk> disk, const Case& what, FaultPlan fault,
                   std::shared_ptr<TapState> state) const {
    return [=] {
      auto engine = make_fault_engine(make_memory_engine(disk), fault);
      return std::make_unique<TapEngine>(std::move(engine), state, what.spoil);
    };
  }

  // A disk with a store of step `what.resume_at`.
  std::shared_ptr<SimulatedDisk> prepare(const Case& what) const {
    auto disk = std::make_shared<SimulatedDisk>(SimulatedDiskOptions{.seed = seed_});
    if (what.resume_at == 0) return disk;
    Case before = what;
    before.steps = what.resume_at;
    const auto seen = run(course(before), tapped(disk, what, {}, std::make_shared<TapState>()),
                          {.compare = false});
    EXPECT_FALSE(seen.error.has_value()) << seen.error->what();
    return disk;
  }

  // Goes on with what lies on the disk, which must be within `bounds`. "", or what is wrong.
  std::string judge(const Course& course, const Case& what, std::shared_ptr<SimulatedDisk> disk,
                    Bounds bounds, Sweep& sweep) const {
    const auto seen =
        run(course, tapped(std::move(disk), what, {}, std::make_shared<TapState>()), {});
    if (seen.error) return "resume failed: " + std::string(seen.error->what());
    const auto step = seen.resumed.value_or(0);
    ++sweep.judged;
    ++sweep.resumed[step];
    if (!seen.wrong.empty()) return "resumed at step " + std::to_string(step) + ": " + seen.wrong;
    if (step >= bounds.least && step <= bounds.most) return "";
    return "resumed at step " + std::to_string(step) + ", expected one of [" +
           std::to_string(bounds.least) + ", " + std::to_string(bounds.most) + "]";
  }

  // Cuts the power at the n-th operation of a run; false: the run was over before.
  bool cut_at(std::uint64_t n, const Course& course, const Case& what,
              const SimulatedDisk& prepared, Sweep& sweep) const {
    const auto disk = prepared.copy();
    disk->cut_power_at(n);
    const auto state = std::make_shared<TapState>();
    const bool catch_up = what.spoil.flush_delay.count() > 0;
    const RunOptions options{.drain = !catch_up && (n + seed_) % 2 == 0, .compare = false,
                             .commit_after = what.commit_after};
    const auto seen = run(course, tapped(disk, what, what.fault, state), options);
    const bool cut = !disk->has_power();
    EXPECT_TRUE(cut || !seen.error) << seen.error->what();
    const Bounds bounds{
        std::max(what.resume_at, last_committed(course, options, seen, state->flushes)),
        std::max(what.resume_at, seen.finishing)};
    for (std::uint64_t s = 0; s < what.seeds; ++s) {
      const auto after = disk->copy();
      after->restart(seed_ + n * what.seeds + s);
      const auto wrong = judge(course, what, after, bounds, sweep);
      if (wrong.empty()) continue;
      sweep.broken.push_back("cut at operation " + std::to_string(n) + ", restart seed " +
                             std::to_string(seed_ + n * what.seeds + s) + ": " + wrong);
    }
    sweep.cuts += cut ? 1 : 0;
    return cut;
  }

  Sweep cut_everywhere(const Case& what) const {
    Sweep sweep;
    const Course all = course(what);
    const auto prepared = prepare(what);
    for (std::uint64_t n = 1; cut_at(n, all, what, *prepared, sweep); ++n) {
    }
    std::printf("%llu cuts, %llu resumed runs; at step:",
                static_cast<unsigned long long>(sweep.cuts),
                static_cast<unsigned long long>(sweep.judged));
    for (const auto& [step, count] : sweep.resumed) {
      std::printf(" %llu (%llu times)", static_cast<unsigned long long>(step),
                  static_cast<unsigned long long>(count));
    }
    std::printf("\n");
    return sweep;
  }

  void expect_none_broken(const Sweep& sweep) const {
    for (std::size_t i = 0; i < std::min<std::size_t>(sweep.broken.size(), 5); ++i) {
      ADD_FAILURE() << "seed " << seed_ << ": " << sweep.broken[i];
    }
    EXPECT_EQ(sweep.broken.size(), 0u);
  }

  void expect_exact(const Case& what) const {
    const auto sweep = cut_everywhere(what);
    expect_none_broken(sweep);
    for (auto step = what.resume_at; step <= what.steps; step += what.interval) {
      EXPECT_TRUE(sweep.resumed.contains(step)) << "no cut led to step " << step;
    }
  }

  const Directory first_{"power-cut-a"};
  const Directory second_{"power-cut-b"};
  const std::uint64_t seed_;
};

TEST_F(PowerCut, NewStore) { expect_exact({.directories = one()}); }

TEST_F(PowerCut, NewStoreOfStatesInRam) {
  expect_exact({.directories = one(), .states = States::dram});
}

TEST_F(PowerCut, ResumedStore) {
  expect_exact({.directories = one(), .states = States::both, .steps = 4, .resume_at = 2});
}

TEST_F(PowerCut, CommitsEveryOtherStep) {
  expect_exact({.directories = one(), .states = States::both, .steps = 4, .interval = 2});
}

TEST_F(PowerCut, TwoDrives) { expect_exact({.directories = two(), .states = States::both}); }

// What a commit speaks of stays as it is until the commit is over, however long that takes.
TEST_F(PowerCut, WhileTheNextStepRuns) {
  const Spoil slow{.flush_delay = std::chrono::milliseconds(4)};
  expect_exact({.directories = one(), .spoil = slow, .seeds = 2});
  expect_exact({.directories = one(), .states = States::both, .steps = 4, .interval = 2,
                .checksums = false, .spoil = slow, .seeds = 2});
}

TEST_F(PowerCut, DeferredUpdates) {
  expect_exact({.directories = one(), .states = States::both, .steps = 4, .resume_at = 1,
                .seeds = 2, .clip = kSmallNorm});
  expect_exact({.directories = two(), .steps = 4, .interval = 2, .seeds = 1, .clip = kSmallNorm});
}

TEST_F(PowerCut, DeferredUpdatesWhileTheNextStepRuns) {
  expect_exact({.directories = one(), .spoil = {.flush_delay = std::chrono::milliseconds(4)},
                .seeds = 2, .clip = kSmallNorm});
}

TEST_F(PowerCut, DeferredUpdatesCommittedOnRequest) {
  const auto sweep = cut_everywhere({.directories = one(), .states = States::both, .interval = 10,
                                     .commit_after = 2, .seeds = 2, .clip = kSmallNorm});
  expect_none_broken(sweep);
  EXPECT_TRUE(sweep.resumed.contains(2));
}

// What holds the steps apart is the order of writes and flushes, not the checksums.
TEST_F(PowerCut, WithoutChecksums) {
  expect_exact({.directories = one(), .states = States::both, .steps = 4, .checksums = false,
                .resume_at = 1});
}

TEST_F(PowerCut, AfterAWriteThatFailed) {
  expect_exact({.directories = one(), .steps = 4, .resume_at = 1,
                .fault = {.at = 20, .only = IoCall::write}, .seeds = 2});
}

TEST_F(PowerCut, CommitsOnRequest) {
  const auto sweep = cut_everywhere({.directories = two(), .states = States::both, .interval = 10,
                                     .commit_after = 2, .seeds = 2});
  expect_none_broken(sweep);
  EXPECT_TRUE(sweep.resumed.contains(2));
}

// Several cuts, one after another, the states now here and now there.
TEST_F(PowerCut, AgainAndAgain) {
  Random random(seed_);
  for (int trial = 0; trial < 30; ++trial) {
    Case what{.directories = pick(random, 0, 1) == 0 ? one() : two(), .steps = 6};
    what.interval = pick(random, 1, 3);
    what.checksums = pick(random, 0, 2) != 0;
    what.clip = pick(random, 0, 1) == 0 ? 0 : kSmallNorm;
    auto disk = std::make_shared<SimulatedDisk>(SimulatedDiskOptions{.seed = random()});
    Bounds bounds;
    std::string story;
    for (auto cuts = pick(random, 1, 5); cuts > 0; --cuts) {
      what.states = static_cast<States>(pick(random, 0, 2));
      const auto n = pick(random, 1, 150);
      const auto seed = random();
      story += "cut " + std::to_string(n) + ", seed " + std::to_string(seed) + "; ";
      disk->cut_power_at(n);
      const auto state = std::make_shared<TapState>();
      const RunOptions options{.drain = pick(random, 0, 1) == 0, .stray = pick(random, 0, 1) == 0};
      const auto all = course(what);
      const auto seen = run(all, tapped(disk, what, {}, state), options);
      ASSERT_EQ(seen.wrong, "") << story;
      ASSERT_TRUE(!seen.error || !disk->has_power()) << story << seen.error->what();
      bounds.least = std::max(bounds.least, last_committed(all, options, seen, state->flushes));
      bounds.most = std::max(bounds.most, seen.finishing);
      disk->restart(seed);
    }
    Sweep sweep;
    ASSERT_EQ(judge(course(what), what, disk, bounds, sweep), "")
        << "seed " << seed_ << " trial " << trial << ": " << story;
  }
}

// A run that does not resume begins anew where nothing was committed, and is refused elsewhere.
TEST_F(PowerCut, IsNoExcuseToReplaceWhatWasCommitted) {
  const Case what{.directories = two(), .states = States::both, .steps = 1};
  const Course all = course(what);
  Course anew = all;
  anew.config.store.mode = StoreMode::fresh;
  std::uint64_t replaced = 0;
  for (std::uint64_t n = 1;; ++n) {
    const auto disk = std::make_shared<SimulatedDisk>(SimulatedDiskOptions{.seed = seed_ + n});
    disk->cut_power_at(n);
    const auto seen = run(all, [&] { return make_memory_engine(disk); }, {});
    const bool cut = !disk->has_power();
    disk->restart(seed_ + n);
    const auto resumed = run(all, [&] { return make_memory_engine(disk->copy()); }, {});
    const auto fresh = run(anew, [&] { return make_memory_engine(disk); }, {});
    SCOPED_TRACE("seed " + std::to_string(seed_) + ", cut at " + std::to_string(n));
    ASSERT_EQ(fresh.error.has_value(), resumed.resumed.has_value());
    ASSERT_EQ(fresh.wrong, "");
    if (fresh.error) {
      ASSERT_EQ(fresh.error->code(), ErrorCode::unavailable) << fresh.error->what();
    } else {
      ++replaced;
    }
    if (!cut) break;
  }
  EXPECT_GT(replaced, 20U);
}

// The same tests must fail where a store is not one.
TEST_F(PowerCut, WouldBeSeenIfFlushesDidNothing) {
  const auto sweep = cut_everywhere({.directories = one(), .spoil = {.drop_flushes = true}});
  EXPECT_GT(sweep.broken.size(), 0u);
}

TEST_F(PowerCut, WouldBeSeenIfThereWereOneSlot) {
  Case what{.directories = one(), .resume_at = 1, .seeds = 1};
  const auto prepared = prepare(what);
  const auto engine = make_memory_engine(prepared);
  const auto found = inspect_store(*engine, engine->open({.path = store_path(first_.path()),
                                                          .mode = IoFileMode::existing}));
  const auto& slot = found.layout.slot;
  what.spoil = {.first_slot = slot[0], .second_slot = slot[1], .slot_bytes = slot[1] - slot[0]};
  Sweep sweep;
  const Course all = course(what);
  ASSERT_EQ(judge(all, what, prepare(what), {1, 1}, sweep), "");  // without a cut all is well
  EXPECT_GT(cut_everywhere(what).broken.size(), 0u);
}

}  // namespace
}  // namespace terrace
