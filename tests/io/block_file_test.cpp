// Real files on real file systems: what opening one promises, and what is left when it fails.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/fsuid.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <optional>
#include <utility>

#include "nvme/block_file.h"
#include "tests/contract/io_engine_contract.h"

namespace terrace {
namespace {

// A file system on a directory of its own, while it lives; needs root.
class Mounted {
 public:
  Mounted(const std::string& type, unsigned long flags, const std::string& data) {
    if (::mount(type.c_str(), directory_.path().c_str(), type.c_str(), flags, data.c_str()) != 0) {
      refusal_ = "mounting " + type + ": " + std::strerror(errno) + " (needs root)";
    }
  }
  ~Mounted() {
    if (refusal_.empty()) ::umount2(directory_.path().c_str(), MNT_DETACH);
  }
  const std::string& refusal() const { return refusal_; }
  const TemporaryDirectory& directory() const { return directory_; }

 private:
  TemporaryDirectory directory_;
  std::string refusal_;
};

std::vector<std::string> entries(const TemporaryDirectory& directory) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    names.push_back(entry.path().filename());
  }
  return names;
}

// The message of the failure; fails when there is none, or when it lacks one of `parts`.
void expect_refused(const IoFileOptions& options, const std::vector<std::string>& parts) {
  try {
    const BlockFile file(options);
    ADD_FAILURE() << options.path << " was opened";
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(error.code(), ErrorCode::io) << text;
    for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

void expect_round_trip(const BlockFile& file) {
  PageBuffer written(kPage);
  PageBuffer read(kPage);
  std::memset(written.data(), 0x5a, kPage);
  const auto last = static_cast<off_t>(file.info().size.count - kPage);
  EXPECT_EQ(::pwrite(file.descriptor(), written.data(), kPage, last), ssize_t{kPage});
  EXPECT_EQ(::pread(file.descriptor(), read.data(), kPage, last), ssize_t{kPage});
  EXPECT_EQ(std::memcmp(written.data(), read.data(), kPage), 0);
}

TEST(BlockFile, ReservesItsSpace) {
  const TemporaryDirectory directory;
  const auto path = directory / "file";
  const BlockFile file({.path = path, .size = {(1 << 20) + 1}});
  EXPECT_EQ(file.info().path, path);
  EXPECT_EQ(file.info().size.count, round_up((1 << 20) + 1, file.info().alignment));
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(static_cast<std::uint64_t>(status.st_size), file.info().size.count);
  EXPECT_EQ(status.st_mode & 0777, 0600u);
  if (file.reserve_note().empty()) {
    EXPECT_GE(static_cast<std::uint64_t>(status.st_blocks) * 512, file.info().size.count);
  }
  EXPECT_EQ((::fcntl(file.descriptor(), F_GETFL) & O_DIRECT) != 0, file.info().direct);
  EXPECT_EQ(file.info().direct_note.empty(), file.info().direct);
  expect_round_trip(file);
}

TEST(BlockFile, IsBufferedWhenAskedTo) {
  const TemporaryDirectory directory;
  const BlockFile file({.path = directory / "file", .size = 1_MiB, .direct = false});
  EXPECT_FALSE(file.info().direct);
  EXPECT_FALSE(file.info().direct_note.empty());
  EXPECT_EQ(::fcntl(file.descriptor(), F_GETFL) & O_DIRECT, 0);
  expect_round_trip(file);
}

TEST(BlockFile, StaysWhenClosedUnlessItIsScratch) {
  const TemporaryDirectory directory;
  { const BlockFile file({.path = directory / "kept", .size = 1_MiB}); }
  EXPECT_EQ(entries(directory), std::vector<std::string>{"kept"});
  const BlockFile scratch(
      {.path = directory / "scratch", .size = 1_MiB, .mode = IoFileMode::scratch});
  EXPECT_EQ(entries(directory), std::vector<std::string>{"kept"});
  EXPECT_EQ(std::filesystem::file_size(scratch.info().path), 1u << 20);
  expect_round_trip(scratch);
}

TEST(BlockFile, LeavesNoScratchAfterAKill) {
  const TemporaryDirectory directory;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const BlockFile file(
        {.path = directory / "scratch", .size = 1_MiB, .mode = IoFileMode::scratch});
    ::kill(::getpid(), SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  EXPECT_TRUE(entries(directory).empty());
}

TEST(BlockFile, HasOneOwner) {
  const TemporaryDirectory directory;
  std::optional<BlockFile> first(std::in_place, IoFileOptions{directory / "file", 1_MiB});
  const BlockFile second(std::move(*first));
  first.reset();
  expect_round_trip(second);
}

TEST(BlockFile, RefusesAFileThatExistsAndLeavesItAlone) {
  const TemporaryDirectory directory;
  std::ofstream(directory / "file") << "precious";
  expect_refused({.path = directory / "file", .size = 1_MiB}, {directory / "file", "remove it"});
  EXPECT_EQ(std::filesystem::file_size(directory / "file"), 8u);
}

TEST(BlockFile, NamesADirectoryThatIsMissing) {
  const TemporaryDirectory directory;
  for (const auto mode : {IoFileMode::create, IoFileMode::scratch}) {
    expect_refused({.path = directory / "none/file", .size = 1_MiB, .mode = mode},
                   {directory / "none", "create the directory"});
  }
}

TEST(BlockFile, NamesADirectoryThatIsNone) {
  const TemporaryDirectory directory;
  std::ofstream(directory / "plain") << "x";
  for (const auto mode : {IoFileMode::create, IoFileMode::scratch}) {
    expect_refused({.path = directory / "plain/file", .size = 1_MiB, .mode = mode},
                   {directory / "plain", "is no directory"});
  }
}

TEST(BlockFile, NamesADirectoryThatIsNotWritable) {
  constexpr uid_t kNobody = 65534;
  const TemporaryDirectory directory;
  ASSERT_EQ(::chmod(directory.path().c_str(), 0555), 0);
  const bool root = ::geteuid() == 0;  // whom permissions do not hold back
  if (root) ::setfsuid(kNobody);
  for (const auto mode : {IoFileMode::create, IoFileMode::scratch}) {
    expect_refused({.path = directory / "file", .size = 1_MiB, .mode = mode},
                   {directory.path(), "writable"});
  }
  if (root) ::setfsuid(0);
  EXPECT_TRUE(entries(directory).empty());
}

TEST(BlockFile, LeavesNothingWhenTheFileWouldBeTooLarge) {
  const TemporaryDirectory directory;
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit low{64 << 10, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &low), 0);  // without our check: death by SIGXFSZ
  for (const auto mode : {IoFileMode::create, IoFileMode::scratch}) {
    expect_refused({.path = directory / "file", .size = 1_MiB, .mode = mode},
                   {directory / "file", std::to_string(1 << 20), "ulimit -f"});
  }
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  for (const Bytes size : {Bytes{~std::uint64_t{0}}, 1_TiB * (1 << 20)}) {
    expect_refused({.path = directory / "file", .size = size}, {std::to_string(size.count)});
  }
  EXPECT_TRUE(entries(directory).empty());
}

TEST(BlockFile, LeavesNothingOnAFullDisk) {
  const Mounted small("tmpfs", 0, "size=1m");
  if (!small.refusal().empty()) GTEST_SKIP() << small.refusal();
  const auto& directory = small.directory();
  for (const auto mode : {IoFileMode::create, IoFileMode::scratch}) {
    expect_refused({.path = directory / "file", .size = 2_MiB, .mode = mode},
                   {directory / "file", std::to_string(2 << 20), "1.00 MiB", "nvme budget"});
  }
  EXPECT_TRUE(entries(directory).empty());
  const BlockFile file({.path = directory / "file", .size = 1_MiB});  // the space is there again
  expect_round_trip(file);
}

TEST(BlockFile, NamesAReadOnlyFileSystem) {
  const Mounted read_only("tmpfs", MS_RDONLY, "size=1m");
  if (!read_only.refusal().empty()) GTEST_SKIP() << read_only.refusal();
  for (const auto mode : {IoFileMode::create, IoFileMode::scratch}) {
    expect_refused({.path = read_only.directory() / "file", .size = 64_KiB, .mode = mode},
                   {read_only.directory().path(), "read-only"});
  }
}

// ramfs has neither O_DIRECT nor fallocate.
TEST(BlockFile, DoesWithoutDirectIoAndReservation) {
  const Mounted plain("ramfs", 0, "");
  if (!plain.refusal().empty()) GTEST_SKIP() << plain.refusal();
  for (const auto mode : {IoFileMode::scratch, IoFileMode::create}) {
    const BlockFile file({.path = plain.directory() / "file", .size = 1_MiB, .mode = mode});
    EXPECT_FALSE(file.info().direct);
    EXPECT_FALSE(file.info().direct_note.empty());
    EXPECT_FALSE(file.reserve_note().empty());
    EXPECT_EQ(file.info().size, 1_MiB);
    expect_round_trip(file);
  }
}

// What the files of an engine had to do without is said once, however many they are.
TEST(BlockFile, TellsTheEngineOnce) {
  const Mounted plain("ramfs", 0, "");
  if (!plain.refusal().empty()) GTEST_SKIP() << plain.refusal();
  const auto engine = make_io_engine(io_options(IoEngineKind::threads));
  for (const std::string name : {"a", "b", "c"}) {
    engine->open({.path = plain.directory() / name, .size = 64_KiB});
  }
  EXPECT_EQ(engine->info().notes.size(), 1u);
}

TEST(BlockFile, OpensOnlyPlainFiles) {
  const TemporaryDirectory directory;
  const auto options = [&](const std::string& name) {
    return IoFileOptions{.path = directory / name, .mode = IoFileMode::existing};
  };
  ASSERT_EQ(::mkfifo((directory / "pipe").c_str(), 0600), 0);
  std::filesystem::create_directory(directory / "directory");
  for (const std::string name : {"pipe", "directory"}) {
    expect_refused(options(name), {directory / name, "regular file"});
    EXPECT_FALSE(file_exists(directory / name));
  }
  std::ofstream(directory / "plain") << "x";
  expect_refused(options("plain/below"), {directory / "plain/below", "is no directory"});
  ASSERT_EQ(::chmod((directory / "plain").c_str(), 0400), 0);
  if (::geteuid() == 0) ::setfsuid(65534);
  expect_refused(options("plain"), {directory / "plain", "readable and writable"});
  if (::geteuid() == 0) ::setfsuid(0);
}

// Times and size tell that nothing was written, as does the content.
TEST(BlockFile, ChangesNothingOfAnExistingFile) {
  const TemporaryDirectory directory;
  const auto path = directory / "file";
  std::ofstream(path) << std::string(2 * kPage + 1, 'x');
  struct stat before {};
  ASSERT_EQ(::stat(path.c_str(), &before), 0);
  { const BlockFile file({.path = path, .size = 1_MiB, .mode = IoFileMode::existing}); }
  struct stat after {};
  ASSERT_EQ(::stat(path.c_str(), &after), 0);
  EXPECT_EQ(after.st_size, before.st_size);
  EXPECT_EQ(after.st_mtim.tv_sec, before.st_mtim.tv_sec);
  EXPECT_EQ(after.st_mtim.tv_nsec, before.st_mtim.tv_nsec);
  EXPECT_EQ(after.st_ctim.tv_nsec, before.st_ctim.tv_nsec);
  EXPECT_EQ(entries(directory), std::vector<std::string>{"file"});
}

TEST(BlockFile, NamesWhatKeepsAFileFromBeingRemoved) {
  const Mounted read_only("tmpfs", MS_RDONLY, "size=1m");
  if (!read_only.refusal().empty()) GTEST_SKIP() << read_only.refusal();
  const TemporaryDirectory directory;
  std::filesystem::create_directory(directory / "directory");
  for (const auto& path : {read_only.directory() / "file", directory / "directory"}) {
    try {
      remove_file(path);
      ADD_FAILURE() << path << " was removed";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::io);
      EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
    }
  }
}

// What tmpfs has left is known to the byte.
TEST(BlockFile, KeepsExactlyWhatIsToBeKeptFree) {
  const Mounted small("tmpfs", 0, "size=1m");
  if (!small.refusal().empty()) GTEST_SKIP() << small.refusal();
  const auto& directory = small.directory();
  for (const auto mode : {IoFileMode::create, IoFileMode::scratch}) {
    IoFileOptions options{
        .path = directory / "file", .size = 512_KiB, .mode = mode, .keep_free = 516_KiB};
    expect_refused(options, {directory / "file", "516.00 KiB", "1.00 MiB", "nvme budget"});
    EXPECT_TRUE(entries(directory).empty());
    options.keep_free = 512_KiB;
    { const BlockFile file(options); }
    if (mode == IoFileMode::create) remove_file(directory / "file");
  }
}

}  // namespace
}  // namespace terrace
