// What the system allows the process: io_uring or not, locked memory, file sizes; and sizes beyond
// what one system call or one registration can do. Limits are set in processes of their own.

#include <gtest/gtest.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>

#include "tests/contract/io_engine_contract.h"

namespace terrace {
namespace {

// From now on `call` fails with `error` in this process, as under a container's profile.
bool forbid(long call, int error) {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<__u32>(call), 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<__u32>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog filter{std::size(program), program};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

bool round_trip(IoEngine& engine, const std::string& path) {
  const auto file = engine.open({.path = path, .size = 1_MiB});
  PageBuffer buffer(1 << 20);
  std::memset(buffer.data(), 7, buffer.span().size());
  for (const auto operation : {IoOperation::write, IoOperation::flush, IoOperation::read}) {
    if (operation == IoOperation::read) std::memset(buffer.data(), 0, buffer.span().size());
    std::vector<Completion> completions;
    if (!engine.submit({{1}, operation, file, 0, buffer.data(), 1 << 20})) return false;
    while (completions.empty()) engine.reap(completions, std::chrono::seconds(1));
    if (completions.front().error != 0) return false;
  }
  return buffer.span().front() == std::byte{7} && buffer.span().back() == std::byte{7};
}

const std::string kCannotTell = "this machine cannot show it";

// Runs `task` in a process of its own; what it returns is a complaint, empty, or kCannotTell.
template <class Task>
void expect_alone(Task task) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    std::string complaint;
    try {
      complaint = task();
    } catch (const std::exception& error) {
      complaint = error.what();
    }
    if (!complaint.empty()) std::fprintf(stderr, "%s\n", complaint.c_str());
    std::_Exit(complaint.empty() ? 0 : complaint == kCannotTell ? 77 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << kCannotTell;
  EXPECT_EQ(WEXITSTATUS(status), 0) << "see the complaint above";
}

struct Refusal {
  std::string name;
  long call;
  int error;
  std::vector<std::string> words;  // in the note: the reason and the remedy
  friend void PrintTo(const Refusal& refusal, std::ostream* stream) { *stream << refusal.name; }
};

class IoUringRefused : public testing::TestWithParam<Refusal> {};

TEST_P(IoUringRefused, ThreadsTakeOverAndSayWhy) {
  const TemporaryDirectory directory;
  expect_alone([&]() -> std::string {
    if (!forbid(GetParam().call, GetParam().error)) return kCannotTell;
    const auto engine = make_io_engine(io_options(IoEngineKind::automatic));
    const auto info = engine->info();
    if (info.engine != "threads") return "the engine is " + info.engine;
    if (info.notes.size() != 1) return std::to_string(info.notes.size()) + " notes";
    for (const auto& word : GetParam().words) {
      if (info.notes.front().find(word) == std::string::npos) return info.notes.front();
    }
    return round_trip(*engine, directory / "file") ? "" : "the threads moved nothing";
  });
}

TEST_P(IoUringRefused, IsAnErrorWhenAskedForByName) {
  expect_alone([&]() -> std::string {
    if (!forbid(GetParam().call, GetParam().error)) return kCannotTell;
    try {
      make_io_engine(io_options(IoEngineKind::io_uring));
    } catch (const Error& error) {
      return error.code() == ErrorCode::unavailable ? "" : error.what();
    }
    return "there is an engine";
  });
}

INSTANTIATE_TEST_SUITE_P(
    Calls, IoUringRefused,
    testing::Values(Refusal{"setup_eperm", SYS_io_uring_setup, EPERM,
                            {"io_uring is refused", "not permitted", "seccomp", "allow"}},
                    Refusal{"setup_enosys", SYS_io_uring_setup, ENOSYS,
                            {"io_uring is refused", "not implemented", "kernel", "seccomp"}},
                    Refusal{"enter_eperm", SYS_io_uring_enter, EPERM,
                            {"io_uring_enter is refused", "not permitted", "seccomp", "allow"}}),
    [](const auto& refusal) { return refusal.param.name; });

// Nothing can be registered: the ring works without, and says so.
TEST(Limits, IoUringWorksWithoutRegistration) {
  const TemporaryDirectory directory;
  expect_alone([&]() -> std::string {
    if (!forbid(SYS_io_uring_register, EPERM)) return kCannotTell;
    const auto engine = make_io_engine({});
    if (engine->info().engine != "io_uring") return kCannotTell;
    PageBuffer buffer(1 << 20);
    const auto span = buffer.span();
    engine->register_buffers(std::span(&span, 1));
    const auto info = engine->info();
    if (info.registered_files || info.registered_buffers) return "something is registered";
    if (info.notes.size() < 2) return "the notes are missing";
    return round_trip(*engine, directory / "file") ? "" : "nothing was moved";
  });
}

TEST(Limits, AutomaticTakesIoUringOrSaysWhyNot) {
  const auto info = make_io_engine({})->info();
  if (info.engine == "io_uring") return;
  EXPECT_EQ(info.engine, "threads");
  ASSERT_FALSE(info.notes.empty());
  EXPECT_NE(info.notes.front().find("io_uring"), std::string::npos) << info.notes.front();
}

// Without the privilege that lifts the limit of locked memory: what fits is registered, the rest
// works as well, and one note gives the limit and the need.
TEST(Limits, LittleLockedMemoryMeansUnregisteredBuffers) {
  const TemporaryDirectory directory;
  ASSERT_EQ(::chmod(directory.path().c_str(), 0777), 0);
  expect_alone([&]() -> std::string {
    const rlimit low{64 << 10, 64 << 10};
    if (::setrlimit(RLIMIT_MEMLOCK, &low) != 0) return "setrlimit failed";
    if (::geteuid() == 0 && ::setuid(65534) != 0) return "setuid failed";
    const auto engine = make_io_engine({});
    if (engine->info().engine != "io_uring") return kCannotTell;
    const auto before = engine->info().notes.size();
    const PageBuffer small(16 << 10);
    const PageBuffer large(1 << 20);
    for (const bool fits : {false, true}) {
      const auto part = make_io_engine({});
      const std::span<std::byte> spans[] = {small.span(), large.span()};
      part->register_buffers(fits ? std::span(spans) : std::span(spans).subspan(1));
      const auto info = part->info();
      if (info.registered_buffers != fits) return fits ? "none is registered" : "one is";
      if (info.notes.size() != before + 1) return std::to_string(info.notes.size()) + " notes";
      for (const std::string word : {"64.00 KiB", "1.00 MiB", "ulimit -l"}) {
        if (info.notes.back().find(word) == std::string::npos) return info.notes.back();
      }
      if (!round_trip(*part, directory / std::to_string(fits))) return "nothing was moved";
    }
    return "";
  });
}

// A write past the limit would end the process with a signal, so such a file is refused at once.
TEST(Limits, AFileLargerThanTheProcessMayWriteIsRefused) {
  const TemporaryDirectory directory;
  std::ofstream(directory / "file") << std::string(1 << 20, 'x');
  expect_alone([&]() -> std::string {
    const rlimit low{64 << 10, 64 << 10};
    if (::setrlimit(RLIMIT_FSIZE, &low) != 0) return "setrlimit failed";
    for (const auto mode : {IoFileMode::existing, IoFileMode::create, IoFileMode::scratch}) {
      const auto name = mode == IoFileMode::existing ? "file" : "new";
      try {
        make_io_engine({})->open({.path = directory / name, .size = 1_MiB, .mode = mode});
        return "it was opened";
      } catch (const Error& error) {
        const std::string text = error.what();
        if (text.find("ulimit -f") == std::string::npos) return text;
        if (text.find(directory / name) == std::string::npos) return text;
      }
    }
    return std::filesystem::exists(directory / "new") ? "something is left behind" : "";
  });
}

// ---- Sizes

// `bytes` of addresses; pages appear when they are used.
class Reserved {
 public:
  explicit Reserved(std::size_t bytes) : bytes_(bytes) {
    void* base = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) throw std::runtime_error("mmap failed");
    data_ = static_cast<std::byte*>(base);
  }
  ~Reserved() { ::munmap(data_, bytes_); }
  Reserved(const Reserved&) = delete;
  std::byte* data() const { return data_; }
  // The same `shared` bytes of memory again and again, up to `end`.
  void repeat(std::size_t shared, std::size_t end) {
    const int memory = ::memfd_create("terrace", MFD_CLOEXEC);
    ASSERT_EQ(::ftruncate(memory, static_cast<off_t>(shared)), 0);
    for (std::size_t at = 0; at < end; at += shared) {
      ASSERT_NE(::mmap(data_ + at, shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory,
                       0),
                MAP_FAILED);
    }
    ::close(memory);
  }

 private:
  std::size_t bytes_;
  std::byte* data_ = nullptr;
};

class Sizes : public IoEngineContract {};

// One request, in transfers of the usual size and in the largest there are. The file is sparse, and
// its first 2 GiB are read into the same memory again and again.
TEST_P(Sizes, OneRequestMayExceedWhatASystemCallMoves) {
  constexpr std::uint64_t kLow = std::uint64_t{2} << 30;
  constexpr std::uint64_t kTail = 1 << 20;
  std::ofstream(directory_ / "sparse") << 'x';
  ASSERT_EQ(::truncate((directory_ / "sparse").c_str(), kLow + kTail), 0);
  Reserved memory(kLow + kTail);
  ASSERT_NO_FATAL_FAILURE(memory.repeat(16 << 20, kLow));
  for (const Bytes block : {1_MiB, 2_GiB}) {
    IoEngineOptions options = GetParam().options;
    options.block = block;
    engine_ = make_io_engine(options);
    const auto file = open_existing("sparse");
    std::byte* tail = memory.data() + kLow;
    std::memset(tail, 9, kTail);
    ASSERT_EQ(run(IoOperation::write, file, kLow, tail, kTail).error, 0);
    std::memset(tail, 0, kTail);
    const auto completion = run(IoOperation::read, file, 0, memory.data(), kLow + kTail);
    EXPECT_EQ(completion.error, 0);
    EXPECT_EQ(completion.bytes, kLow + kTail);
    EXPECT_EQ(std::count(tail, tail + kTail, std::byte{9}), std::ptrdiff_t{kTail});
  }
}

// Registered in pieces; transfers within one and across two of them are right.
TEST_P(Sizes, OneBufferMayExceedWhatCanBeRegistered) {
  constexpr std::uint64_t kPiece = std::uint64_t{1} << 30;
  constexpr std::uint64_t kSpan = 1 << 20;
  Reserved memory(kPiece + kSpan);
  ASSERT_NO_FATAL_FAILURE(memory.repeat(16 << 20, kPiece - (16 << 20)));
  const std::span<std::byte> whole(memory.data(), kPiece + kSpan);
  engine_->register_buffers(std::span(&whole, 1));
  const auto file = open({2 * kSpan});
  std::mt19937_64 random(6);
  PageBuffer wanted(2 * kSpan);
  fill(wanted.span(), random);
  std::byte* first = memory.data() + kPiece - kSpan + 12 * kPage;  // no multiple of the block
  const auto bytes = 2 * kSpan - 12 * kPage;
  std::memcpy(first, wanted.data(), bytes);
  ASSERT_EQ(run(IoOperation::write, file, 0, first, bytes).error, 0);
  std::memset(first, 0, bytes);
  ASSERT_EQ(run(IoOperation::read, file, 0, first, bytes).error, 0);
  EXPECT_EQ(std::memcmp(first, wanted.data(), bytes), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Engines, Sizes,
    testing::Values(IoEngineCase{"io_uring", io_options(IoEngineKind::io_uring)},
                    IoEngineCase{"threads", io_options(IoEngineKind::threads)}),
    io_engine_name);

}  // namespace
}  // namespace terrace
