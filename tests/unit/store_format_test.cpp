// What a store writes about itself comes back as it was; anything else is refused with a reason.
#include "nvme/store_format.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "nvme/checksum.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::size_t kChecksumAt = 8;  // of an envelope
constexpr std::size_t kBytesAt = 16;
constexpr std::size_t kFieldsAt = 24;
constexpr std::size_t kHeaderBytes = 48;
constexpr std::size_t kRecordHead = 104;

using Memory = std::vector<std::byte>;

void put(Memory& memory, std::size_t at, std::uint64_t value, std::size_t size = 8) {
  std::memcpy(memory.data() + at, &value, size);
}

// Makes the checksum right again, as an enemy would.
Memory sealed(Memory memory, std::size_t used) {
  put(memory, kChecksumAt, hash_bytes(memory.data() + kBytesAt, used - kBytesAt));
  return memory;
}

Superblock superblock() {
  Superblock block;
  block.store = ~std::uint64_t{0} - 5;
  block.drive = 2;
  block.weights = {1, 250, 1000000};
  block.checksums = false;
  block.identity = {{"seed", "7"}, {"data", "a=b, c"}, {"empty", ""}};
  block.regions = {{"momentum of block0", {{}, 40_KiB}, 16_KiB, 4_KiB},
                   {"a, b", {40_KiB, 4_KiB}, 1_MiB, 128_KiB},
                   {"", {44_KiB, 8_KiB}, 4_KiB, 4_KiB}};
  return block;
}

std::string text_of(const Superblock& block) {
  const auto encoded = encode(block, 64_KiB);
  return reinterpret_cast<const char*>(encoded.text.data());
}

DecodedSuperblock decode_text(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return decode_superblock({64_KiB, text.size(), hash_bytes(text.data(), text.size())}, bytes);
}

TEST(Superblock, ComesBackAsItWas) {
  const auto block = superblock();
  const auto encoded = encode(block, 8_KiB);
  ASSERT_EQ(encoded.header.size(), kStorePage.count);
  ASSERT_EQ(encoded.text.size(), 8192U);
  const auto header = decode_header(encoded.header);
  ASSERT_TRUE(header.header.has_value()) << header.why_not;
  EXPECT_FALSE(header.blank);
  EXPECT_EQ(header.header->text_bytes, 8_KiB);
  const auto found = decode_superblock(*header.header, encoded.text);
  ASSERT_TRUE(found.superblock.has_value()) << found.why_not;
  EXPECT_EQ(found.superblock->store, block.store);
  EXPECT_EQ(found.superblock->drive, block.drive);
  EXPECT_EQ(found.superblock->weights, block.weights);
  EXPECT_EQ(found.superblock->checksums, block.checksums);
  EXPECT_EQ(found.superblock->identity, block.identity);
  ASSERT_EQ(found.superblock->regions.size(), block.regions.size());
  for (std::size_t i = 0; i < block.regions.size(); ++i) {
    EXPECT_EQ(found.superblock->regions[i].name, block.regions[i].name);
    EXPECT_EQ(found.superblock->regions[i].extent, block.regions[i].extent);
    EXPECT_EQ(found.superblock->regions[i].segment, block.regions[i].segment);
    EXPECT_EQ(found.superblock->regions[i].tile, block.regions[i].tile);
  }
}

TEST(Superblock, HasRoomForTheLongestLines) {
  Superblock block;
  block.weights.assign(64, 1000000);
  block.identity = {{"key", std::string(kIdentityBytes.count - 14, 'v')}};
  const Bytes size{(std::uint64_t{1} << 31) * 4096};
  for (std::uint64_t i = 0; i < 30; ++i) {
    block.regions.push_back({std::string(1000, 'n'), {i * size, size}, 1_MiB, 1_MiB});
  }
  const auto layout = store_file_layout({}, block.regions.size());
  const auto encoded = encode(block, layout.text_bytes);
  const auto header = decode_header(encoded.header).header;
  ASSERT_TRUE(header.has_value());
  const auto found = decode_superblock(*header, encoded.text);
  ASSERT_TRUE(found.superblock.has_value()) << found.why_not;
  EXPECT_EQ(found.superblock->identity, block.identity);
  EXPECT_EQ(found.superblock->regions.back().name, std::string(150, 'n'));
}

TEST(Superblock, RefusesIdentityThatWouldNotComeBack) {
  for (const auto& [key, value] : StoreIdentity{{"a=b", "1"},
                                                {"a\nb", "1"},
                                                {"a", "1\n2"},
                                                {"a", "1\r"},
                                                {"a", std::string("\0", 1)},
                                                {"a", std::string(kIdentityBytes.count, 'v')}}) {
    auto block = superblock();
    block.identity = {{key, value}};
    EXPECT_THROW(encode(block, 64_KiB), Error) << key;
  }
}

TEST(Superblock, IsRefusedWhenCutShort) {
  const auto text = text_of(superblock());
  for (std::size_t size = 0; size < text.size(); ++size) {
    const auto lines = decode_text(text.substr(0, size));  // with a checksum of what is left
    EXPECT_TRUE(!lines.superblock || (size > 0 && text[size - 1] == '\n')) << size;
    const auto part = std::as_bytes(std::span(text)).first(size);
    const SuperblockHeader header{64_KiB, text.size(), hash_bytes(text.data(), text.size())};
    EXPECT_FALSE(decode_superblock(header, part).superblock.has_value()) << size;
  }
  EXPECT_TRUE(decode_text(text).superblock.has_value());
  const auto encoded = encode(superblock(), 8_KiB);
  for (std::size_t size = 0; size < kHeaderBytes; ++size) {
    const auto found = decode_header(std::span(encoded.header).first(size));
    EXPECT_FALSE(found.header.has_value()) << size;
    EXPECT_FALSE(found.why_not.empty());
  }
}

TEST(Superblock, IsRefusedWhenAnyByteIsAnother) {
  const auto encoded = encode(superblock(), 8_KiB);
  const auto header = *decode_header(encoded.header).header;
  for (std::size_t i = 0; i < kHeaderBytes; ++i) {
    auto changed = encoded.header;
    changed[i] ^= std::byte{1};
    EXPECT_FALSE(decode_header(changed).header.has_value()) << i;
  }
  for (std::size_t i = 0; i < header.text_used; ++i) {
    auto changed = encoded.text;
    changed[i] ^= std::byte{0x80};
    EXPECT_FALSE(decode_superblock(header, changed).superblock.has_value()) << i;
  }
}

TEST(Superblock, RefusesHostileHeaders) {
  const auto good = encode(superblock(), 8_KiB).header;
  const auto with = [&](std::size_t at, std::uint64_t value) {
    auto page = good;
    put(page, at, value);
    return decode_header(sealed(page, kHeaderBytes));
  };
  EXPECT_TRUE(with(kFieldsAt, 4096).header.has_value());
  for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{4097}, std::uint64_t{1} << 40,
                                    ~std::uint64_t{0}, std::uint64_t{0}}) {
    EXPECT_FALSE(with(kFieldsAt, bytes).header.has_value()) << bytes;
  }
  EXPECT_FALSE(with(kFieldsAt + 8, 8193).header.has_value());  // text_used
  EXPECT_FALSE(with(kBytesAt, 4096).header.has_value());
  EXPECT_FALSE(with(kBytesAt, 16).header.has_value());
  EXPECT_FALSE(with(kBytesAt, ~std::uint64_t{0}).header.has_value());
  EXPECT_TRUE(decode_header(Memory(4096)).blank);
  EXPECT_FALSE(decode_header(Memory(4096)).header.has_value());
}

TEST(Superblock, RefusesHostileTexts) {
  const std::string head = "store=1\ndrive=0\nweights=1,2\nchecksums=1\n";
  ASSERT_TRUE(decode_text(head).superblock.has_value());
  for (const std::string line :
       {"unknown=1\n", "no value\n", "=\n", "store=2\n", "drive=0\n", "weights=1\n", "\n",
        "region=0,0,4096,4096,empty\n", "region=4096,4096,4096,4096,gap\n",
        "region=0,4097,4096,4096,odd\n", "region=0,4096,4097,4096,odd\n",
        "region=0,4096,0,4096,nothing\n", "region=0,4096,4096,0,nothing\n",
        "region=0,4096,4096,4096\n", "region=0,4096,4294967296,4096,long\n",
        "region=0,72057594037927936,4096,4096,large\n", "region=0,17592186044416,4096,4096,many\n",
        "region=0,18446744073709551616,4096,4096,overflow\n", "region=0,+4096,4096,4096,sign\n",
        "region=0,04096,4096,4096,zero\n", "region=0, 4096,4096,4096,space\n",
        "region=0,4096,4096,4096,line\rend\n", "identity.late"}) {
    const auto found = decode_text(head + line);
    EXPECT_FALSE(found.superblock.has_value()) << line;
    EXPECT_FALSE(found.why_not.empty()) << line;
  }
  for (const std::string text :
       {"", "\n", "store=1\ndrive=2\nweights=1,2\nchecksums=1\n",
        "store=1\ndrive=4294967296\nweights=1,2\nchecksums=1\n",
        "store=1\ndrive=0\nweights=\nchecksums=1\n", "store=1\ndrive=0\nweights=0\nchecksums=1\n",
        "store=1\ndrive=0\nweights=1,\nchecksums=1\n",
        "store=1\ndrive=0\nweights=4294967297\nchecksums=1\n",
        "store=1\ndrive=0\nweights=1000001\nchecksums=1\n",
        "store=1\ndrive=0\nweights=1\nchecksums=2\n", "drive=0\nstore=1\nweights=1\nchecksums=1\n",
        "store=01\ndrive=0\nweights=1\nchecksums=1\n", "store=1\ndrive=0\nweights=1\n"}) {
    EXPECT_FALSE(decode_text(text).superblock.has_value()) << text;
  }
}

// ---- records

CommitRecord record(std::size_t trainer_bytes) {
  CommitRecord found{1, 2, 3, 4, 5, 6, -7, 8, 1, {}};
  for (std::size_t i = 0; i < trainer_bytes; ++i) found.trainer += static_cast<char>(i * 7 + 1);
  return found;
}

Memory slot_of(const CommitRecord& what) {
  auto bytes = encode(what);
  EXPECT_EQ(bytes.size() % kStorePage.count, 0U);
  EXPECT_LE(bytes.size(), kRecordBytes.count);
  bytes.resize(kRecordBytes.count);
  return bytes;
}

TEST(Record, ComesBackAsItWas) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{4095},
                                 std::size_t{4096}, std::size_t{4097}, most_trainer_bytes()}) {
    const auto what = record(size);
    const auto found = decode_record(slot_of(what));
    ASSERT_TRUE(found.record.has_value()) << found.why_not;
    EXPECT_EQ(found.trainer_problem, "");
    EXPECT_FALSE(found.blank);
    EXPECT_EQ(encode(*found.record), encode(what));
    EXPECT_EQ(found.record->trainer, what.trainer);
    EXPECT_EQ(found.record->step, 3U);
    EXPECT_EQ(found.record->unix_time, -7);
    EXPECT_EQ(found.record->drive, 8U);
    EXPECT_EQ(found.record->table, 1U);
  }
}

// A drive writes a sector as a whole.
TEST(Record, CountsByItsFirstSector) {
  const auto bytes = encode(record(5000));
  for (std::size_t i = kRecordHead; i < kStorePage.count; ++i) {
    ASSERT_EQ(bytes[i], std::byte{}) << i;
  }
}

TEST(Record, IsRefusedWhenCutShort) {
  const auto bytes = encode(record(5000));
  for (std::size_t size = 0; size < kRecordHead; ++size) {
    const auto found = decode_record(std::span(bytes).first(size));
    EXPECT_FALSE(found.record.has_value()) << size;
    EXPECT_FALSE(found.why_not.empty());
  }
  for (std::size_t size = kRecordHead; size < kStorePage.count + 5000; ++size) {
    const auto found = decode_record(std::span(bytes).first(size));
    ASSERT_TRUE(found.record.has_value()) << size;
    ASSERT_NE(found.trainer_problem, "") << size;
  }
  EXPECT_EQ(decode_record(std::span(bytes).first(kStorePage.count + 5000)).trainer_problem, "");
}

TEST(Record, IsRefusedWhenAnyByteIsAnother) {
  const auto bytes = slot_of(record(100));
  for (std::size_t i = 0; i < kRecordHead; ++i) {
    auto changed = bytes;
    changed[i] ^= std::byte{0x20};
    EXPECT_FALSE(decode_record(changed).record.has_value()) << i;
  }
  for (std::size_t i = 0; i < 100; ++i) {
    auto changed = bytes;
    changed[kStorePage.count + i] ^= std::byte{1};
    const auto found = decode_record(changed);
    ASSERT_TRUE(found.record.has_value());
    EXPECT_NE(found.trainer_problem, "") << i;
    EXPECT_EQ(found.record->trainer, "");
  }
}

TEST(Record, RefusesHostileValues) {
  const auto good = slot_of(record(10));
  const auto with = [&](std::size_t at, std::uint64_t value, std::size_t size = 8) {
    auto bytes = good;
    put(bytes, at, value, size);
    return decode_record(sealed(bytes, kRecordHead));
  };
  const std::size_t table_at = kFieldsAt + 7 * 8 + 4;
  const std::size_t trainer_at = kFieldsAt + 8 * 8;
  EXPECT_TRUE(with(kFieldsAt, 12).record.has_value());
  EXPECT_FALSE(with(table_at, 2, 4).record.has_value());
  EXPECT_FALSE(with(trainer_at, most_trainer_bytes() + 1).record.has_value());
  EXPECT_FALSE(with(trainer_at, ~std::uint64_t{0}).record.has_value());
  EXPECT_NE(with(trainer_at, 11).trainer_problem, "");
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{kRecordHead - 1},
                                    std::uint64_t{4096}, ~std::uint64_t{0}}) {
    EXPECT_FALSE(with(kBytesAt, bytes).record.has_value()) << bytes;
  }
  EXPECT_TRUE(decode_record(Memory(kRecordBytes.count)).blank);
  EXPECT_FALSE(decode_record(Memory(kRecordBytes.count)).record.has_value());
  auto behind = Memory(kRecordBytes.count);  // a first commit that did not get further
  behind[kStorePage.count] = std::byte{1};
  EXPECT_TRUE(decode_record(behind).blank);
}

TEST(Record, RefusesNoise) {
  std::mt19937_64 random(5);
  for (int i = 0; i < 1000; ++i) {
    Memory bytes(8192);
    for (auto& byte : bytes) byte = static_cast<std::byte>(random());
    EXPECT_FALSE(decode_record(bytes).record.has_value());
    EXPECT_FALSE(decode_header(bytes).header.has_value());
    EXPECT_FALSE(looks_like_record(bytes));
  }
  EXPECT_TRUE(looks_like_record(encode(record(0))));
}

// ---- tables

class Table : public testing::Test {
 protected:
  Table() {
    for (std::size_t s = 0; s < geometry_.segments(); ++s) {
      const auto& place = geometry_.place(s);
      if (place.drive != 1) continue;
      entries_.push_back({(layout_.slot[s % 2] + place.offset).count, 9, 9,
                          static_cast<std::uint32_t>(s),
                          static_cast<std::uint32_t>(place.size.count)});
    }
  }
  std::string problem() const { return table_problem(entries_, geometry_, 1, layout_); }

  const StoreGeometry geometry_{{{"a", {{}, 100_KiB}, 8_KiB, 8_KiB},
                                 {"b", {100_KiB, 60_KiB}, 16_KiB, 8_KiB}},
                                {1, 1}};
  const StoreFileLayout layout_ = store_file_layout(geometry_.shares()[1], 2);
  std::vector<TableEntry> entries_;
};

TEST_F(Table, MayPointToSlotsAndSpares) {
  ASSERT_GT(entries_.size(), 3U);
  EXPECT_EQ(problem(), "");
  for (std::uint64_t i = 0; i < layout_.spare_count; ++i) {
    entries_[i].offset = (layout_.spares + i * layout_.spare_bytes).count;
  }
  EXPECT_EQ(problem(), "");
}

TEST_F(Table, IsRefusedWhenAnEntryIsWrong) {
  const auto good = entries_;
  const auto refused = [&](const char* what) {
    EXPECT_NE(problem(), "") << what;
    entries_ = good;
  };
  for (std::size_t i = 0; i < good.size(); ++i) {
    ++entries_[i].segment;
    refused("another segment");
    entries_[i].length += 4096;
    refused("another length");
    for (const std::uint64_t offset :
         {good[i].offset + 1, std::uint64_t{0}, ~std::uint64_t{0}, layout_.size.count,
          layout_.slot[0].count - 4096, layout_.spares.count + 1,
          (layout_.spares + layout_.spare_count * layout_.spare_bytes).count}) {
      entries_[i].offset = offset;
      refused("another place");
    }
  }
  entries_.pop_back();
  refused("too few");
  entries_.push_back(good.back());
  refused("too many");
  entries_.clear();
  refused("none");
  std::swap(entries_[0], entries_[1]);
  refused("another order");
  EXPECT_EQ(problem(), "");
}

}  // namespace
}  // namespace terrace
