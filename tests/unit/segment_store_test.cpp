// The store on the simulated disk: bytes go where the geometry says, and come back or are missed.
#include "nvme/segment_store.h"

#include <gtest/gtest.h>

#include <cerrno>

#include "nvme/simulation.h"
#include "tests/support/directory.h"

namespace terrace {
namespace {

constexpr Bytes kSegment = 8_KiB;
constexpr Bytes kDurable = 100_KiB;  // the last segment is short
constexpr Bytes kScratch = 40_KiB;
constexpr Bytes kTransient = 64_KiB;

class SegmentStoreTest : public testing::Test {
 protected:
  ~SegmentStoreTest() override { close(); }

  StoreOptions options(std::vector<double> speeds = {1, 3}) const {
    StoreOptions options;
    for (std::size_t d = 0; d < speeds.size(); ++d) {
      options.drives.push_back({(d == 0 ? first_ : second_).path(), speeds[d], {}});
    }
    options.durable = {{"states", {{}, kDurable}, kSegment, 4_KiB}};
    options.scratch = {{"parameters", {kDurable, kScratch}, 4_KiB, 4_KiB},
                       {"inputs", {kDurable + kScratch, kTransient}, 4_KiB, 4_KiB}};
    options.transient = kDurable + kScratch;
    options.transient_tile = 4_KiB;
    options.identity = {{"seed", "1"}};
    return options;
  }
  void open(const StoreOptions& options, FaultPlan fault = {}) {
    close();
    engine_ = make_fault_engine(make_memory_engine(disk_), fault);
    store_.emplace(*engine_, options);
  }
  void resume(StoreOptions options) {
    options.mode = StoreMode::resume;
    open(options);
  }
  void close() {
    store_.reset();
    engine_.reset();
  }

  // Bytes that depend on their address and on `salt`.
  std::span<std::byte> fill(Extent extent, std::uint64_t salt) {
    for (std::uint64_t i = 0; i < extent.size.count; ++i) {
      const auto address = extent.offset.count + i;
      buffer_.data()[i] = static_cast<std::byte>(address * 7 + address / 4096 * 31 + salt);
    }
    return buffer_.span().first(extent.size.count);
  }
  void write(Extent extent, std::uint64_t salt) {
    store_->write_now(extent, fill(extent, salt), salt);
  }
  void expect_there(Extent extent, std::uint64_t salt) {
    PageBuffer found(extent.size);
    store_->read_now(extent, found.span());
    const auto wanted = fill(extent, salt);
    EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), found.data()));
  }
  std::string refused(Extent extent) {
    PageBuffer found(extent.size);
    try {
      store_->read_now(extent, found.span());
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  }

  const Directory first_{"store-a"};
  const Directory second_{"store-b"};
  const std::shared_ptr<SimulatedDisk> disk_ = std::make_shared<SimulatedDisk>();
  std::unique_ptr<IoEngine> engine_;
  std::optional<SegmentStore> store_;
  PageBuffer buffer_{kDurable};
};

constexpr Extent kAll{{}, kDurable};

TEST_F(SegmentStoreTest, DealsBytesToTheDrivesByTheirSpeed) {
  open(options());
  write(kAll, 1);
  expect_there(kAll, 1);
  expect_there({kSegment * 3, kSegment * 2}, 1);
  store_->commit_now(1, "one");
  const auto stats = store_->stats();
  ASSERT_EQ(stats.size(), 2U);
  const StoreGeometry geometry(options().durable, {250, 750});
  for (std::size_t d = 0; d < 2; ++d) {
    const auto metadata = kStorePage * 3;  // table, trainer's bytes, record
    EXPECT_EQ(stats[d].written, geometry.shares()[d].bytes + metadata);
    EXPECT_GT(stats[d].reserved, geometry.shares()[d].bytes * 2);
  }
}

TEST_F(SegmentStoreTest, ComesBackAtItsLastCommit) {
  open(options());
  write(kAll, 1);
  store_->commit_now(1, "one");
  write(kAll, 2);
  store_->commit_now(2, "two");
  write({kSegment, kSegment}, 3);
  resume(options());
  ASSERT_TRUE(store_->resumed().has_value());
  EXPECT_EQ(store_->resumed()->step, 2U);
  EXPECT_EQ(store_->resumed()->trainer, "two");
  expect_there(kAll, 2);
}

// Runs of segments, scratch, and pieces of what lives for one step.
TEST_F(SegmentStoreTest, KeepsScratchApart) {
  open(options());
  const Extent scratch{kDurable, kScratch};
  const Extent early{kDurable + kScratch, 12_KiB};
  const Extent late{kDurable + kScratch + 20_KiB, 44_KiB};
  write(kAll, 1);
  write(scratch, 2);
  write(early, 3);
  write(late, 4);
  expect_there(kAll, 1);
  expect_there(scratch, 2);
  expect_there({kDurable + 8_KiB, 8_KiB}, 2);
  expect_there(early, 3);
  expect_there(late, 4);
  write({kDurable + kScratch + 4_KiB, 32_KiB}, 5);  // over parts of both
  EXPECT_NE(refused(early), "");
  EXPECT_NE(refused(late), "");
}

TEST_F(SegmentStoreTest, SaysWhatIsNotWhatWasWritten) {
  auto told = options();
  told.describe = [](Extent extent) {
    return "the bytes at " + std::to_string(extent.offset.count);
  };
  open(told);
  write(kAll, 6);
  EXPECT_EQ(store_->tiles(kAll), 25U);
  EXPECT_EQ(store_->tile({}), 4_KiB);
  std::vector<std::uint64_t> tiles;
  const auto bytes = fill(kAll, 6);
  for (std::size_t i = 0; i < 25; ++i) tiles.push_back(hash_bytes(bytes.data() + i * 4096, 4096));
  EXPECT_EQ(store_->mismatch(kAll, tiles), "");
  ++tiles[3];  // of the second segment
  const auto said = store_->mismatch(kAll, tiles);
  for (const std::string part : {"the bytes at 8192", "8192 bytes at offset", "terrace.store",
                                 "step 6", "is expected", "found", "store verify"}) {
    EXPECT_NE(said.find(part), std::string::npos) << part << ": " << said;
  }
  // Staged is not written.
  --tiles[3];
  store_->stage({kSegment, kSegment}, 7, std::vector<std::uint64_t>{1, 2});
  EXPECT_EQ(store_->mismatch(kAll, tiles), "");
}

TEST_F(SegmentStoreTest, BytesOfAnotherPlaceOrStepAreNotThese) {
  open(options());
  write(kAll, 1);
  const auto hash = [&](Extent extent, std::uint64_t salt) {
    const auto bytes = fill(extent, salt);
    return hash_tiles(bytes, 4_KiB);
  };
  const Extent first{{}, kSegment};
  const Extent second{kSegment, kSegment};
  EXPECT_EQ(store_->mismatch(first, hash(first, 1)), "");
  EXPECT_NE(store_->mismatch(second, hash(first, 1)), "");
  store_->write_now(first, fill(first, 1), 2);  // the same bytes, a step later
  store_->write_now(second, fill(first, 1), 2);  // the same bytes elsewhere
  EXPECT_EQ(store_->mismatch(first, hash(first, 1)), "");
  EXPECT_EQ(store_->mismatch(second, hash(first, 1)), "");
}

TEST_F(SegmentStoreTest, WithoutChecksumsNothingIsMissed) {
  auto plain = options();
  plain.checksums = false;
  open(plain);
  write(kAll, 1);
  expect_there(kAll, 1);
  EXPECT_EQ(store_->mismatch(kAll, std::vector<std::uint64_t>(25)), "");
}

// A write that fails once: each segment again, and what is bad is moved.
TEST_F(SegmentStoreTest, MovesWhatCannotBeWritten) {
  std::uint64_t moved = 0;
  for (std::uint64_t n = 1;; ++n) {
    disk_->restart(n);
    auto discard = options({1});
    discard.mode = StoreMode::discard;
    open(discard);
    write(kAll, 1);
    store_->commit_now(1, "");
    close();
    engine_ = make_fault_engine(make_memory_engine(disk_), {.at = n, .only = IoCall::write,
                                                            .kind = FaultKind::short_completion});
    auto again = options({1});
    again.mode = StoreMode::resume;
    store_.emplace(*engine_, again);
    const auto said = [&]() -> std::string {
      try {
        for (std::uint64_t s = 0; s < 12; ++s) write({s * kSegment, kSegment}, 2);
        store_->commit_now(2, "");
      } catch (const Error& error) {
        return error.what();
      }
      return "";
    }();
    if (n <= 12) {
      EXPECT_EQ(said, "") << n;
      EXPECT_EQ(store_->quarantined(), 1U);
      ASSERT_EQ(store_->notes().size(), 1U);
      EXPECT_NE(store_->notes()[0].find("the place is used no more"), std::string::npos);
      ++moved;
      expect_there({{}, 12 * kSegment}, 2);
      resume(options({1}));
      expect_there({{}, 12 * kSegment}, 2);
      EXPECT_EQ(store_->resumed()->step, 2U);
    } else if (said.empty()) {
      EXPECT_EQ(n, 15U);  // behind the table and the record
      break;
    } else {
      EXPECT_NE(said.find("the commit of step 2"), std::string::npos) << said;
      EXPECT_TRUE(store_->broken().has_value());
    }
  }
  EXPECT_EQ(moved, 12U);
}

TEST_F(SegmentStoreTest, AReadThatIsCutShortFails) {
  open(options({1}), {.at = 1, .only = IoCall::read, .kind = FaultKind::short_completion});
  write(kAll, 1);
  EXPECT_NE(refused(kAll).find("bytes at offset"), std::string::npos);
  expect_there(kAll, 1);
}

TEST_F(SegmentStoreTest, RefusesAnotherRunsStore) {
  open(options());
  write(kAll, 1);
  store_->commit_now(1, "");
  close();
  const auto said = [&](StoreOptions other, StoreMode mode) -> std::string {
    other.mode = mode;
    try {
      open(other);
    } catch (const Error& error) {
      engine_.reset();
      return error.what();
    }
    return "";
  };
  EXPECT_NE(said(options(), StoreMode::fresh).find("holds step 1 of a run"), std::string::npos);
  auto other = options();
  other.identity = {{"seed", "2"}};
  EXPECT_NE(said(other, StoreMode::resume).find("seed: 1 there, 2 here"), std::string::npos);
  other = options();
  other.checksums = false;
  EXPECT_NE(said(other, StoreMode::resume).find("checksums: on there, off"), std::string::npos);
  other = options();
  other.durable[0].segment = 4_KiB;
  EXPECT_NE(said(other, StoreMode::resume).find("8192 there, 4096 here"), std::string::npos);
  other = options();
  std::swap(other.drives[0], other.drives[1]);
  EXPECT_NE(said(other, StoreMode::resume).find("another order"), std::string::npos);
  other.drives.pop_back();
  EXPECT_NE(said(other, StoreMode::resume).find("was not named"), std::string::npos);
  EXPECT_EQ(said(options(), StoreMode::resume), "");
  expect_there(kAll, 1);
}

// One segment, two drives: the other one has records and nothing else.
TEST_F(SegmentStoreTest, ADriveMayHoldNothing) {
  auto few = options();
  few.durable[0].extent.size = few.scratch[0].extent.offset = 4_KiB;
  few.scratch.resize(1);
  few.transient = few.scratch[0].extent.end();
  open(few);
  const Extent only{{}, 4_KiB};
  for (std::uint64_t step = 1; step < 5; ++step) {
    write(only, step);
    store_->commit_now(step, "");
  }
  EXPECT_EQ(store_->stats()[0].written, 4 * kStorePage);
  resume(few);
  EXPECT_EQ(store_->resumed()->step, 4U);
  expect_there(only, 4);
}

TEST_F(SegmentStoreTest, RefusesTooMuchOfTheTrainersBytes) {
  open(options());
  write(kAll, 1);
  store_->commit_now(1, std::string(most_trainer_bytes(), 'x'));
  EXPECT_THROW(store_->commit_now(2, std::string(most_trainer_bytes() + 1, 'x')), Error);
  store_->commit_now(2, "");
  resume(options());
  EXPECT_EQ(store_->resumed()->step, 2U);
}

}  // namespace
}  // namespace terrace
