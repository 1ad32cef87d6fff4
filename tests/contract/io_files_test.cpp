// The contract of IoEngine about files: modes, names, drives. For every implementation.

#include <gtest/gtest.h>

#include <cerrno>
#include <fstream>

#include "tests/contract/io_engine_contract.h"

namespace terrace {
namespace {

class IoFilesContract : public IoEngineContract {};

TEST_P(IoFilesContract, RefusesToCreateAFileThatExists) {
  open(4_KiB);
  expect_error(ErrorCode::io, {directory_ / "file"}, [&] { open(4_KiB); });
}

TEST_P(IoFilesContract, FindsAFileAsItWasLeft) {
  std::mt19937_64 random(5);
  PageBuffer written(64 << 10);
  PageBuffer read(64 << 10);
  fill(written.span(), random);
  EXPECT_FALSE(engine_->exists(directory_ / "file"));
  auto file = open(64_KiB);
  EXPECT_TRUE(engine_->exists(directory_ / "file"));
  ASSERT_EQ(run(IoOperation::write, file, 0, written.data(), 64 << 10).error, 0);
  engine_->close(file);
  EXPECT_TRUE(engine_->exists(directory_ / "file"));
  for (int i = 0; i < 2; ++i) {  // opening it twice changes nothing either
    file = open_existing("file");
    EXPECT_EQ(engine_->file_info(file).size, 64_KiB);
    EXPECT_EQ(engine_->file_info(file).path, directory_ / "file");
    ASSERT_EQ(run(IoOperation::read, file, 0, read.data(), 64 << 10).error, 0);
    EXPECT_EQ(std::memcmp(read.data(), written.data(), 64 << 10), 0);
    engine_->close(file);
  }
  file = open_existing("file");
  fill(written.span(), random);
  ASSERT_EQ(run(IoOperation::write, file, 0, written.data(), 64 << 10).error, 0);
  ASSERT_EQ(run(IoOperation::read, file, 0, read.data(), 64 << 10).error, 0);
  EXPECT_EQ(std::memcmp(read.data(), written.data(), 64 << 10), 0);
}

TEST_P(IoFilesContract, RoundsTheSizeOfAnExistingFileDown) {
  if (!GetParam().real_files) GTEST_SKIP() << "its files are in memory";
  constexpr std::uint64_t kSize = 3 * kPage + 77;
  std::ofstream(directory_ / "file") << std::string(kSize, 'x');
  std::ofstream(directory_ / "small") << "tiny";
  PageBuffer buffer(4 * kPage);
  const auto file = open_existing("file");
  EXPECT_EQ(engine_->file_info(file).size.count, 3 * kPage);
  EXPECT_EQ(run(IoOperation::read, file, 2 * kPage, buffer.data(), kPage).error, 0);
  EXPECT_EQ(buffer.data()[0], std::byte{'x'});
  EXPECT_EQ(run(IoOperation::read, file, 3 * kPage, buffer.data(), kPage).error, ENODATA);
  EXPECT_EQ(std::filesystem::file_size(directory_ / "file"), kSize);
  EXPECT_EQ(engine_->file_info(open_existing("small")).size, 0_B);
  EXPECT_EQ(std::filesystem::file_size(directory_ / "small"), 4u);
}

TEST_P(IoFilesContract, SaysThatAFileIsMissing) {
  expect_error(ErrorCode::io, {directory_ / "none", "no such file"},
               [&] { open_existing("none"); });
  expect_error(ErrorCode::io, {directory_ / "none", "no such file"},
               [&] { engine_->remove(directory_ / "none"); });
  EXPECT_FALSE(engine_->exists(directory_ / "none"));
  EXPECT_FALSE(engine_->exists(directory_ / "none/below"));
}

TEST_P(IoFilesContract, RemovesANameAndNotWhatIsOpen) {
  PageBuffer buffer(4 * kPage);
  const auto file = open({4 * kPage});
  engine_->remove(directory_ / "file");
  EXPECT_FALSE(engine_->exists(directory_ / "file"));
  const auto other = open({8 * kPage});  // the name is free again
  EXPECT_EQ(engine_->file_info(file).size.count, 4 * kPage);
  EXPECT_EQ(engine_->file_info(other).size.count, 8 * kPage);
  std::memset(buffer.data(), 1, kPage);
  EXPECT_EQ(run(IoOperation::write, file, 0, buffer.data(), kPage).error, 0);
  EXPECT_EQ(run(IoOperation::read, other, 0, buffer.data(), kPage).error, 0);
  EXPECT_EQ(buffer.data()[0], std::byte{0});
  EXPECT_EQ(run(IoOperation::read, file, 0, buffer.data(), kPage).error, 0);
  EXPECT_EQ(buffer.data()[0], std::byte{1});
}

TEST_P(IoFilesContract, GivesScratchFilesNoName) {
  const IoFileOptions options{
      .path = directory_ / "scratch", .size = 64_KiB, .mode = IoFileMode::scratch};
  PageBuffer buffer(64 << 10);
  for (const auto file : {engine_->open(options), engine_->open(options)}) {
    EXPECT_FALSE(engine_->exists(directory_ / "scratch"));
    EXPECT_EQ(run(IoOperation::write, file, 0, buffer.data(), 64 << 10).error, 0);
  }
}

TEST_P(IoFilesContract, KeepsSpaceFree) {
  if (!GetParam().real_files) GTEST_SKIP() << "its files are in memory";
  for (const auto mode : {IoFileMode::create, IoFileMode::scratch}) {
    for (const Bytes kept : {Bytes{std::uint64_t{1} << 62}, Bytes{~std::uint64_t{0}}}) {
      expect_error(ErrorCode::io, {directory_ / "file", "1048576", "nvme budget"}, [&] {
        engine_->open(
            {.path = directory_ / "file", .size = 1_MiB, .mode = mode, .keep_free = kept});
      });
    }
  }
  EXPECT_FALSE(engine_->exists(directory_ / "file"));
  open(1_MiB);
  engine_->open({.path = directory_ / "kept", .size = 1_MiB, .keep_free = 4_KiB});
  engine_->open({.path = directory_ / "file",
                 .mode = IoFileMode::existing,
                 .keep_free = {~std::uint64_t{0}}});
}

TEST_P(IoFilesContract, RefusesADriveThatItDoesNotHave) {
  expect_error(ErrorCode::invalid_argument, {directory_ / "file", "drive 2", "2 drives"}, [&] {
    engine_->open({.path = directory_ / "file", .size = 4_KiB, .drive = 2});
  });
  EXPECT_FALSE(engine_->exists(directory_ / "file"));
}

// One drive's capacity is exhausted; the other's is not.
TEST_P(IoFilesContract, CountsTheCapacityOfEachDrive) {
  PageBuffer buffer(kPage);
  std::vector<FileId> files;
  for (const std::uint32_t drive : {0u, 1u}) {
    files.push_back(engine_->open(
        {.path = directory_ / std::to_string(drive), .size = 4_KiB, .drive = drive}));
    EXPECT_EQ(engine_->file_info(files.back()).drive, drive);
  }
  std::uint64_t ticket = 0;
  const auto write = [&](FileId file) {
    return engine_->submit({{ticket++}, IoOperation::write, file, 0, buffer.data(), kPage});
  };
  while (ticket < 100'000 && write(files[0])) {
  }
  ASSERT_LT(ticket, 100'000u);
  EXPECT_TRUE(write(files[1]));
  const auto completions = drain();
  EXPECT_EQ(completions.size(), ticket - 1);
  for (const auto& [key, completion] : completions) EXPECT_EQ(completion.error, 0) << key;
}

INSTANTIATE_TEST_SUITE_P(Engines, IoFilesContract, testing::ValuesIn(io_engine_kinds()),
                         io_engine_name);

}  // namespace
}  // namespace terrace
