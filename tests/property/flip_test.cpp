// A committed store whose bytes are changed one by one: each change is found, or is where nothing
// counts. Never other bits than those that were written.
#include <gtest/gtest.h>

#include <cstring>

#include "nvme/segment_store.h"
#include "nvme/store_check.h"
#include "nvme/store_files.h"
#include "nvme/store_inspect.h"
#include "runtime/store_plan.h"
#include "tests/support/store_run.h"

namespace terrace {
namespace {

constexpr std::byte kFlips[] = {std::byte{0x10}, std::byte{0xff}};

// A store's file on a simulated disk, of which bytes can be changed and read past any store.
class OpenFile {
 public:
  OpenFile(const std::shared_ptr<SimulatedDisk>& disk, const std::string& path)
      : engine_(make_memory_engine(disk)),
        file_(engine_->open({.path = path, .mode = IoFileMode::existing})),
        io_(*engine_) {}

  void flip(std::uint64_t offset, std::byte bits) {
    std::vector<std::byte> page(kStorePage.count);
    const Bytes at{offset / page.size() * page.size()};
    io_.read(file_, at, page);
    page[offset - at.count] ^= bits;
    io_.write(file_, at, page);
  }
  InspectedStore inspect() { return inspect_store(*engine_, file_); }
  IoEngine& engine() { return *engine_; }

 private:
  const std::unique_ptr<IoEngine> engine_;
  const FileId file_;
  BlockingIo io_;
};

std::string text_of(const Superblock& superblock) {
  const auto bytes = encode(superblock, 64_KiB).text;
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

bool same(const CommitRecord& a, const CommitRecord& b) {
  return encode(a) == encode(b);
}

class Flips : public testing::Test {
 protected:
  Flips() : seed_(fresh_seed()), random_(seed_) {}

  Course course(std::uint64_t steps, States states = States::nvme) const {
    return {small_mlp(), small_config({directory_.path()}, states), steps};
  }

  // A store of so many steps.
  std::shared_ptr<SimulatedDisk> make(std::uint64_t steps, States states = States::nvme,
                                      FaultPlan fault = {}) const {
    auto disk = std::make_shared<SimulatedDisk>(
        SimulatedDiskOptions{.write_cache = false, .shuffled = false});
    const auto seen = run(course(steps, states),
                          [&] { return make_fault_engine(make_memory_engine(disk), fault); }, {});
    EXPECT_FALSE(seen.error.has_value()) << seen.error->what();
    return disk;
  }

  // Calls of a run that makes such a store.
  std::uint64_t counted(IoCall call) const {
    const auto counters = std::make_shared<FaultCounters>();
    run(course(2),
        [&] {
          auto engine = make_memory_engine(std::make_shared<SimulatedDisk>());
          return make_fault_engine(std::move(engine), {}, counters);
        },
        {});
    return counters->calls[static_cast<std::size_t>(call)];
  }

  std::string path() const { return store_path(directory_.path()); }

  // What a flipped file amounts to: "" when that is safe.
  static std::string problem(const InspectedStore& clean, const InspectedStore& flipped) {
    const auto outlook = judge({flipped});
    if (outlook.state == StoreOutlook::State::damaged) return "";
    if (outlook.state == StoreOutlook::State::empty) return "passes for a store without a commit";
    if (text_of(*flipped.sound()) != text_of(*clean.sound())) return "another superblock";
    const auto i = outlook.commit.front();
    if (!clean.committed(i) || !same(*clean.record[i].record, *flipped.record[i].record)) {
      return "another record";
    }
    if (flipped.table[i] != clean.table[i]) return "another table";
    const bool newest = i == judge({clean}).commit.front();
    const bool told = !flipped.record[1 - i].record || !flipped.table_problem[1 - i].empty();
    return newest || told ? "" : "an older commit is taken without a word";
  }

  void flip_all(OpenFile& file, Bytes begin, Bytes size, std::uint64_t stride) {
    const auto clean = file.inspect();
    const auto first = stride == 1 ? 0 : pick(random_, 0, stride - 1);
    for (auto offset = begin.count + first; offset < (begin + size).count; offset += stride) {
      for (const auto bits : kFlips) {
        file.flip(offset, bits);
        const auto wrong = problem(clean, file.inspect());
        file.flip(offset, bits);
        ASSERT_EQ(wrong, "") << "seed " << seed_ << ", byte " << offset;
        ++flips_;
      }
    }
  }

  // Everything that the file says about itself.
  void flip_metadata(const std::shared_ptr<SimulatedDisk>& disk) {
    OpenFile file(disk, path());
    const auto layout = file.inspect().layout;
    flip_all(file, layout.header[0], layout.record[0], 1);
    for (const auto record : layout.record) {
      flip_all(file, record, kStorePage * 2, 1);  // the trainer's bytes end there
      flip_all(file, record + kStorePage * 2, kRecordBytes - kStorePage * 2, 97);
    }
    flip_all(file, layout.table[0], layout.slot[0] - layout.table[0], 1);
    std::printf("%llu flips\n", static_cast<unsigned long long>(flips_));
  }

  StoreOptions options() const {
    const auto all = course(1);
    const ModelLayout layout(all.mlp.spec(), all.config.segment);
    StoreOptions options;
    options.drives = {{directory_.path(), 1, {}}};
    options.durable = durable_regions(layout);
    options.mode = StoreMode::resume;
    options.transient = options.durable.back().extent.end();
    return options;
  }

  void flip_segments(const std::shared_ptr<SimulatedDisk>& disk);
  void flip_and_train(States states, std::uint64_t stride);

  const Directory directory_{"flip"};
  const std::uint64_t seed_;
  Random random_;
  std::uint64_t flips_ = 0;
};

TEST_F(Flips, OfMetadataAreFoundOrDoNotCount) { flip_metadata(make(2)); }

TEST_F(Flips, OfTheMetadataOfAFirstCommitAreFoundOrDoNotCount) { flip_metadata(make(1)); }

// Every byte of slots and spares: the segments of the newest commit are read, and only the one that
// was changed is refused.
void Flips::flip_segments(const std::shared_ptr<SimulatedDisk>& disk) {
  OpenFile file(disk, path());
  const auto found = file.inspect();
  const auto& table = found.table[judge({found}).commit.front()];
  auto settings = options();
  settings.identity = found.sound()->identity;
  const auto engine = make_memory_engine(disk);
  SegmentStore store(*engine, settings);
  const StoreGeometry geometry(found.sound()->regions, {1});
  std::map<std::uint64_t, std::size_t> segments;  // by offset in the file
  for (const auto& entry : table) segments[entry.offset] = entry.segment;
  PageBuffer buffer(8_KiB);
  const auto readable = [&](std::size_t segment) {
    const auto extent = geometry.extent(segment);
    try {
      store.read_now(extent, buffer.span().first(extent.size.count));
      return true;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt) << error.what();
      return false;
    }
  };
  for (auto offset = found.layout.slot[0].count; offset < found.layout.size.count; ++offset) {
    auto near = segments.upper_bound(offset);
    const bool before_all = near == segments.begin();
    if (!before_all) --near;
    const bool inside =
        !before_all && offset < near->first + geometry.place(near->second).size.count;
    for (const auto bits : kFlips) {
      file.flip(offset, bits);
      const bool sound = readable(near->second);
      file.flip(offset, bits);
      ASSERT_EQ(sound, !inside) << "byte " << offset;
      ++flips_;
    }
  }
  for (const auto& entry : table) EXPECT_TRUE(readable(entry.segment));
  std::printf("%llu flips\n", static_cast<unsigned long long>(flips_));
}

TEST_F(Flips, OfSegmentsAreFoundOrDoNotCount) { flip_segments(make(2)); }

TEST_F(Flips, OfSegmentsInSparesAreFoundOrDoNotCount) {
  const auto uses_spare = [&](const std::shared_ptr<SimulatedDisk>& disk) {
    const auto found = OpenFile(disk, path()).inspect();
    const auto& table = found.table[judge({found}).commit.front()];
    return std::any_of(table.begin(), table.end(), [&](const TableEntry& entry) {
      return entry.offset >= found.layout.spares.count;
    });
  };
  // The last writes of data come before those of the last commit.
  std::uint64_t writes = counted(IoCall::write) - 5;
  std::shared_ptr<SimulatedDisk> disk;
  for (; disk == nullptr || !uses_spare(disk); --writes) {
    ASSERT_GT(writes, 20U);
    disk = make(2, States::nvme, {.at = writes, .only = IoCall::write});
  }
  flip_segments(disk);
}

// The whole way: a run that resumes ends with an error or with the exact bits.
void Flips::flip_and_train(States states, std::uint64_t stride) {
  const auto clean = make(2, states);
  const auto all = course(3, states);
  const auto size = OpenFile(clean, path()).inspect().layout.size;
  std::map<std::string, std::uint64_t> ends;
  for (auto offset = pick(random_, 0, stride - 1); offset < size.count;
       offset += pick(random_, 1, 2 * stride)) {
    const auto disk = clean->copy();
    OpenFile(disk, path()).flip(offset, kFlips[offset % 2]);
    const auto seen = run(all, [&] { return make_memory_engine(disk); }, {});
    SCOPED_TRACE("seed " + std::to_string(seed_) + ", byte " + std::to_string(offset));
    if (seen.error) {
      EXPECT_EQ(seen.error->code(), ErrorCode::corrupt) << seen.error->what();
      ++ends["refused"];
      continue;
    }
    ASSERT_EQ(seen.wrong, "");
    const auto step = seen.resumed.value_or(0);
    ++ends["resumed at step " + std::to_string(step)];
    ASSERT_GE(step, 1U);
    EXPECT_TRUE(step == 2 || !seen.notes.empty());
  }
  for (const auto& [end, count] : ends) {
    std::printf("%s: %llu times\n", end.c_str(), static_cast<unsigned long long>(count));
  }
  EXPECT_GT(ends["refused"], 0U);
  EXPECT_GT(ends["resumed at step 2"], 0U);
}

TEST_F(Flips, EndARunOrDoNotCount) { flip_and_train(States::nvme, 997); }

TEST_F(Flips, EndARunWithStatesInRamOrDoNotCount) { flip_and_train(States::dram, 997); }

// `terrace store verify` finds exactly what a run would.
TEST_F(Flips, AreFoundByACheck) {
  const auto disk = make(2);
  OpenFile file(disk, path());
  const auto found = file.inspect();
  const auto& layout = found.layout;
  const auto damages = [&] {
    const auto store = find_store(file.engine(), {directory_.path()});
    const auto check = check_store(file.engine(), store);
    for (const auto& drive : store.drives) file.engine().close(drive.file);
    return check.damaged;
  };
  EXPECT_EQ(damages(), 0U);
  const auto newest = judge({found}).commit.front();
  for (int i = 0; i < 40; ++i) {
    const auto& entry = found.table[newest][pick(random_, 0, found.table[newest].size() - 1)];
    const std::uint64_t places[] = {
        entry.offset + pick(random_, 0, entry.length - 1),
        layout.record[pick(random_, 0, 1)].count + pick(random_, 0, 90),
        layout.record[newest].count + kStorePage.count + pick(random_, 0, 1000),
        layout.table[newest].count + pick(random_, 0, 9 * kTableEntryBytes - 1),
        layout.header[pick(random_, 0, 1)].count + pick(random_, 0, 47),
        layout.text[pick(random_, 0, 1)].count + pick(random_, 0, 200)};
    for (const auto offset : places) {
      const auto bits = kFlips[pick(random_, 0, 1)];
      file.flip(offset, bits);
      EXPECT_GT(damages(), 0U) << "seed " << seed_ << ", byte " << offset;
      file.flip(offset, bits);
    }
  }
}

}  // namespace
}  // namespace terrace
