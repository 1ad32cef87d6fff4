#include "nvme/block_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::uint32_t kLeastAlignment = 4096;
constexpr std::uint64_t kLargestFile = std::uint64_t{1} << 62;  // off_t is signed

std::string directory_of(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string remedy(int error, const std::string& path) {
  const auto directory = directory_of(path);
  switch (error) {
    case ENOENT: return "create the directory " + directory + " or name another one";
    case EACCES:
    case EPERM: return "make " + directory + " writable or name another directory";
    case EROFS: return directory + " is on a read-only file system; name another directory";
    case EEXIST: return "another run uses it or left it; remove it if no process does";
    case ENOTDIR: return directory + " is no directory; name one";
    case EMFILE:
    case ENFILE: return "raise the limit of open files (ulimit -n)";
    case ENOSPC: return "free space there or name another directory";
    case EDQUOT: return "raise the quota or name another directory";
    case EFBIG:
      return "raise the file size limit (ulimit -f) or name a directory on a file system that "
             "takes larger files";
    default: return "see whether the drive and its file system are healthy";
  }
}

Error failure(const std::string& what, const std::string& path, int error) {
  return {ErrorCode::io,
          what + " " + path + " failed: " + std::strerror(error) + "; " + remedy(error, path)};
}

Error no_space(const IoFileOptions& options, int error) {
  std::string free = "unknown";
  struct statvfs space {};
  if (::statvfs(directory_of(options.path).c_str(), &space) == 0) {
    free = to_string(Bytes{space.f_bavail * static_cast<std::uint64_t>(space.f_frsize)});
  }
  return {ErrorCode::io, "reserving " + std::to_string(options.size.count) + " bytes (" +
                             to_string(options.size) + ") for " + options.path + " failed: " +
                             std::strerror(error) + "; free there: " + free +
                             "; lower the nvme budget, or " + remedy(error, options.path)};
}

// The largest file that the process may write: past it the kernel would send SIGXFSZ, which kills.
std::uint64_t largest_file() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0) return kLargestFile;
  return std::min<std::uint64_t>(kLargestFile, limit.rlim_cur);
}

// The result of a system call that is made again when a signal cuts it short.
template <class Call>
auto uninterrupted(Call call) {
  auto result = call();
  while (result < 0 && errno == EINTR) result = call();
  return result;
}

// One direct write and one direct read of the first block: 0 or an errno value.
int try_block(int descriptor, std::size_t bytes) {
  const std::unique_ptr<void, void (*)(void*)> block(std::aligned_alloc(bytes, bytes), std::free);
  if (block == nullptr) return ENOMEM;
  std::memset(block.get(), 0, bytes);
  if (uninterrupted([&] { return ::pwrite(descriptor, block.get(), bytes, 0); }) < 0) return errno;
  if (uninterrupted([&] { return ::pread(descriptor, block.get(), bytes, 0); }) < 0) return errno;
  return 0;
}

}  // namespace

BlockFile::BlockFile(const IoFileOptions& options) {
  info_.path = options.path;
  create(options);
  try {
    info_.direct_note = "not asked for";
    if (options.direct) ask_direct(options.path);
    reserve(options);
    if (info_.direct) probe_direct(options);
  } catch (...) {
    close_descriptor();
    if (!options.scratch) ::unlink(options.path.c_str());
    throw;
  }
}

BlockFile::~BlockFile() { close_descriptor(); }

BlockFile::BlockFile(BlockFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      info_(std::move(other.info_)),
      reserve_note_(std::move(other.reserve_note_)) {}

void BlockFile::close_descriptor() noexcept {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

// Without O_DIRECT at first: an open that is refused for it may already have made the file.
void BlockFile::create(const IoFileOptions& options) {
  const int flags = O_RDWR | O_CLOEXEC | O_EXCL;
  bool named = !options.scratch;
  if (options.scratch) {
    descriptor_ = ::open(directory_of(options.path).c_str(), flags | O_TMPFILE, 0600);
    named = descriptor_ < 0 && (errno == EOPNOTSUPP || errno == EISDIR);
  }
  if (named) descriptor_ = ::open(options.path.c_str(), flags | O_CREAT, 0600);
  if (descriptor_ < 0) throw failure("creating", options.path, errno);
  if (!options.scratch) return;
  if (named && ::unlink(options.path.c_str()) != 0) {
    const int error = errno;
    close_descriptor();
    throw failure("removing the name of", options.path, error);
  }
  info_.path = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(descriptor_);
}

bool BlockFile::set_direct(bool on) {
  const int flags = ::fcntl(descriptor_, F_GETFL);
  if (flags < 0) return false;
  return ::fcntl(descriptor_, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

// Direct I/O, and what it wants of offset, length and address.
void BlockFile::ask_direct(const std::string& path) {
  info_.direct = set_direct(true);
  if (!info_.direct && errno != EINVAL) throw failure("asking for O_DIRECT on", path, errno);
#ifdef STATX_DIOALIGN
  struct statx status {};
  if (info_.direct && ::statx(descriptor_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN) != 0) {
    info_.alignment = std::max({kLeastAlignment, status.stx_dio_mem_align,
                                status.stx_dio_offset_align});
    const bool possible = status.stx_dio_offset_align != 0;  // 0: not on this file
    if (!possible) info_.direct = !set_direct(false);
  }
#endif
  info_.direct_note =
      info_.direct ? "" : "the file system refuses O_DIRECT; the page cache is used";
}

void BlockFile::reserve(const IoFileOptions& options) {
  if (options.size.count > kLargestFile) throw no_space(options, EFBIG);
  info_.size = round_up(options.size, Bytes{info_.alignment});
  if (info_.size.count == 0) return;
  if (info_.size.count > largest_file()) throw no_space(options, EFBIG);
  const auto size = static_cast<off_t>(info_.size.count);
  if (uninterrupted([&] { return ::fallocate(descriptor_, 0, 0, size); }) == 0) return;
  if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG) throw no_space(options, errno);
  if (errno != EOPNOTSUPP && errno != ENOSYS) {
    throw failure("reserving space for", options.path, errno);
  }
  if (::ftruncate(descriptor_, size) != 0) throw no_space(options, errno);
  reserve_note_ = "the file system cannot reserve space, so a write may find the disk full: keep "
                  "the nvme budget free there, or use ext4 or XFS";
}

// Some file systems accept the flag and refuse the transfer. The file is new: nothing is lost.
void BlockFile::probe_direct(const IoFileOptions& options) {
  if (info_.size.count == 0) return;
  const int error = try_block(descriptor_, info_.alignment);
  if (error == 0) return;
  if (error == ENOSPC || error == EDQUOT) throw no_space(options, error);
  if (error != EINVAL && error != EOPNOTSUPP) {
    throw failure("writing and reading the first block of", options.path, error);
  }
  if (!set_direct(false)) throw failure("leaving direct I/O on", options.path, errno);
  info_.direct = false;
  info_.direct_note = "the file system refuses direct transfers; the page cache is used";
}

}  // namespace terrace
