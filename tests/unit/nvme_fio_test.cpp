#include "tools/nvme_fio.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace terrace::cli {
namespace {

using bench::Cell;
using bench::Pattern;

constexpr std::uint64_t kMiB = 1 << 20;

bool has(const std::vector<std::string>& arguments, const std::string& argument) {
  return std::ranges::find(arguments, argument) != arguments.end();
}

// Whole blocks inside the file, half of it at a time, and not always the same half.
TEST(FioPlace, IsHalfOfTheFileAndMoves) {
  for (const std::uint64_t file : {2 * kMiB, 64 * kMiB, 1023 * kMiB}) {
    for (const std::uint64_t block : {4096UL, 128UL * 1024, kMiB}) {
      std::set<std::uint64_t> begins;
      for (std::size_t pair = 0; pair < 14; ++pair) {
        const auto place = FioPlace::of_pair(pair, file, block);
        EXPECT_EQ(place.offset % block, 0U);
        EXPECT_EQ(place.bytes, file / block / 2 * block);
        EXPECT_LE(place.offset + place.bytes, file);
        begins.insert(place.offset);
        EXPECT_EQ(place.offset, FioPlace::of_pair(pair + 7, file, block).offset) << "seven places";
      }
      EXPECT_EQ(*begins.begin(), 0U);
      EXPECT_EQ(begins.size(), file / block < 14 ? 1U : 7U) << file << " " << block;
    }
  }
}

TEST(FioPlace, OfOneBlockIsThatBlock) {
  const auto place = FioPlace::of_pair(3, kMiB, kMiB);
  EXPECT_EQ(place.offset, 0U);
  EXPECT_EQ(place.bytes, kMiB);
}

TEST(Fio, HasACounterpartOfThreePatterns) {
  for (const auto pattern : bench::kPatterns) {
    EXPECT_EQ(Fio::can(pattern),
              pattern == Pattern::read || pattern == Pattern::overwrite || pattern == Pattern::mix);
  }
}

TEST(Fio, IsAskedForWhatWeDo) {
  const auto read =
      Fio::arguments({Pattern::read, 256 * 1024, 8, 1}, "/proc/7/fd/9", {kMiB, 4 * kMiB}, 0.25);
  EXPECT_EQ(read.front(), "fio");
  for (const char* wanted :
       {"--filename=/proc/7/fd/9", "--rw=read", "--bs=262144", "--iodepth=8", "--offset=1048576",
        "--size=4194304", "--runtime=250ms", "--time_based", "--ioengine=io_uring", "--direct=1",
        "--fixedbufs=1", "--registerfiles=1", "--allow_file_create=0", "--output-format=json"}) {
    EXPECT_TRUE(has(read, wanted)) << wanted;
  }
  EXPECT_FALSE(has(read, "--rwmixread=50"));
  const auto write = Fio::arguments({Pattern::overwrite, kMiB, 1, 1}, "f", {0, kMiB}, 1);
  EXPECT_TRUE(has(write, "--rw=write"));
  const auto mix = Fio::arguments({Pattern::mix, kMiB, 1, 1}, "f", {0, kMiB}, 1);
  EXPECT_TRUE(has(mix, "--rw=rw"));
  EXPECT_TRUE(has(mix, "--rwmixread=50"));
}

// Huge pages are asked for where there are enough, else fio would not start at all.
TEST(Fio, AsksForHugePagesThatAreThere) {
  const Cell most{Pattern::read, std::uint64_t{1} << 40, 1024, 1};
  EXPECT_FALSE(Fio::huge_pages(most));
  EXPECT_FALSE(has(Fio::arguments(most, "f", {0, kMiB}, 1), "--mem=shmhuge"));
  const Cell least{Pattern::read, 4096, 1, 1};
  EXPECT_EQ(has(Fio::arguments(least, "f", {0, kMiB}, 1), "--mem=shmhuge"), Fio::huge_pages(least));
}

// A colon separates files in fio's eyes.
TEST(Fio, TakesAnyPath) {
  const auto arguments = Fio::arguments({Pattern::read, kMiB, 1, 1}, "/a:b/c d", {0, kMiB}, 1);
  EXPECT_TRUE(has(arguments, "--filename=/a\\:b/c d"));
}

TEST(CommandText, IsQuotedForAShell) {
  EXPECT_EQ(command_text({"fio", "--bs=4096", "--filename=/a b"}),
            "fio --bs=4096 '--filename=/a b'");
  EXPECT_EQ(command_text({"a\\:b"}), "'a\\:b'");
  EXPECT_EQ(command_text({"it's"}), "'it'\\''s'");
  EXPECT_EQ(command_text({"*.dat", ""}), "'*.dat' ''");
}

}  // namespace
}  // namespace terrace::cli
