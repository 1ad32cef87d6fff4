#include "nvme/block_file.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "nvme/transfers.h"
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

// Free for this process, on the file system of `directory`; nothing when that cannot be told.
std::optional<std::uint64_t> free_space(const std::string& directory) {
  struct statvfs space {};
  if (::statvfs(directory.c_str(), &space) != 0) return {};
  return space.f_bavail * static_cast<std::uint64_t>(space.f_frsize);
}

Error missing(const std::string& what, const std::string& path) {
  return {ErrorCode::io, what + " " + path + " failed: there is no such file; check the path"};
}

Error no_space(const IoFileOptions& options, int error) {
  const auto space = free_space(directory_of(options.path));
  const std::string free = space ? to_string(Bytes{*space}) : "unknown";
  return {ErrorCode::io, "reserving " + std::to_string(options.size.count) + " bytes (" +
                             to_string(options.size) + ") for " + options.path + " failed: " +
                             std::strerror(error) + "; free there: " + free +
                             "; lower the nvme budget, or " + remedy(error, options.path)};
}

// Before anything is made: a reservation that is given back may have stopped another process.
void check_kept_free(const IoFileOptions& options) {
  const auto free = free_space(directory_of(options.path));
  if (options.keep_free.count == 0 || !free) return;
  if (options.keep_free.count <= *free && options.size.count <= *free - options.keep_free.count) {
    return;
  }
  throw Error(ErrorCode::io,
              "making " + options.path + " of " + std::to_string(options.size.count) + " bytes (" +
                  to_string(options.size) + ") would not leave the " +
                  to_string(options.keep_free) + " free that are to be kept; free there: " +
                  to_string(Bytes{*free}) +
                  "; lower the nvme budget, free space there or name another directory");
}

// The largest file that the process may write: past it the kernel would send SIGXFSZ, which kills.
std::uint64_t largest_file() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0) return kLargestFile;
  return std::min<std::uint64_t>(kLargestFile, limit.rlim_cur);
}

// The result of a system call that is made again when a signal cuts it short, within a bound.
template <class Call>
auto uninterrupted(Call call) {
  auto result = call();
  for (int i = 0; result < 0 && errno == EINTR && i < kMaxInterruptions; ++i) result = call();
  return result;
}

// Makes what was done to the directory's names durable. 0 or an errno value.
int sync_directory(const std::string& directory) {
  const int descriptor = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) return errno;
  const int error = uninterrupted([&] { return ::fsync(descriptor); }) == 0 ? 0 : errno;
  ::close(descriptor);
  return error == EINVAL ? 0 : error;  // a file system without such a thing
}

using Block = std::unique_ptr<std::byte, void (*)(void*)>;

Block make_block(std::size_t bytes) {
  Block block(static_cast<std::byte*>(std::aligned_alloc(bytes, bytes)), std::free);
  if (block == nullptr) throw std::bad_alloc();
  std::memset(block.get(), 0, bytes);
  return block;
}

}  // namespace

bool refuses_direct(int error) { return error == EINVAL || error == EOPNOTSUPP; }

bool file_exists(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0) return S_ISREG(status.st_mode);
  if (errno == ENOENT || errno == ENOTDIR) return false;
  throw failure("looking for", path, errno);
}

void remove_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0) {
    if (errno == ENOENT) throw missing("removing", path);
    throw failure("removing", path, errno);
  }
  const auto directory = directory_of(path);
  if (const int error = sync_directory(directory)) throw failure("syncing", directory, error);
}

BlockFile::BlockFile(const IoFileOptions& options) {
  info_.path = options.path;
  info_.drive = options.drive;
  info_.direct_note = "not asked for";
  if (options.mode == IoFileMode::existing) {
    find(options);
  } else {
    check_kept_free(options);
    create(options);
    ask_in_place();
  }
  try {
    if (options.direct) ask_direct(options.path);
    if (options.mode == IoFileMode::existing) {
      measure(options);
    } else {
      make(options);
    }
  } catch (...) {
    close_descriptor();
    if (options.mode == IoFileMode::create) ::unlink(options.path.c_str());
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
  const bool scratch = options.mode == IoFileMode::scratch;
  bool named = !scratch;
  if (scratch) {
    descriptor_ = ::open(directory_of(options.path).c_str(), flags | O_TMPFILE, 0600);
    named = descriptor_ < 0 && (errno == EOPNOTSUPP || errno == EISDIR);
  }
  if (named) descriptor_ = ::open(options.path.c_str(), flags | O_CREAT, 0600);
  if (descriptor_ < 0) throw failure("creating", options.path, errno);
  if (!scratch) return;
  if (named && ::unlink(options.path.c_str()) != 0) {
    const int error = errno;
    close_descriptor();
    throw failure("removing the name of", options.path, error);
  }
  info_.path = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(descriptor_);
}

// A file that is there, and nothing else: opening a pipe or a device can have effects of its own.
void BlockFile::find(const IoFileOptions& options) {
  const auto& path = options.path;
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw Error(ErrorCode::io, "opening " + path + " failed: it is not a regular file; name one");
  }
  descriptor_ = ::open(path.c_str(), (options.read_only ? O_RDONLY : O_RDWR) | O_CLOEXEC);
  if (descriptor_ >= 0) return;
  if (errno == ENOENT) throw missing("opening", path);
  if (errno != EACCES && errno != EPERM) throw failure("opening", path, errno);
  throw Error(ErrorCode::io, "opening " + path + " failed: " + std::strerror(errno) +
                                 "; make it readable " +
                                 (options.read_only ? "" : "and writable ") + "for this user");
}

// The size of a file that was there, and whether it takes direct transfers.
void BlockFile::measure(const IoFileOptions& options) {
  const auto& path = options.path;
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) throw failure("measuring", path, errno);
  const auto size = static_cast<std::uint64_t>(status.st_size);
  info_.size = {size / info_.alignment * info_.alignment};
  if (!options.read_only && info_.size.count > largest_file()) {
    throw Error(ErrorCode::io, "opening " + path + " failed: its size of " +
                                   std::to_string(size) + " bytes exceeds the limit of this "
                                   "process, which writing to it would end; raise the file size "
                                   "limit (ulimit -f)");
  }
  if (info_.direct && info_.size.count > 0) probe_read(path);
}

// Gives the new file its space, and its name for good.
void BlockFile::make(const IoFileOptions& options) {
  reserve(options);
  if (info_.direct && info_.size.count > 0) probe_direct(options);
  if (options.mode == IoFileMode::scratch) return;
  if (uninterrupted([&] { return ::fsync(descriptor_); }) != 0) {
    throw failure("syncing", options.path, errno);
  }
  const auto directory = directory_of(options.path);
  if (const int error = sync_directory(directory)) throw failure("syncing", directory, error);
}

bool BlockFile::set_direct(bool on) {
  const int flags = ::fcntl(descriptor_, F_GETFL);
  if (flags < 0) return false;
  return ::fcntl(descriptor_, F_SETFL, on ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
}

// Btrfs sends direct transfers of a file with checksums of its own through the page cache, and
// copies what is overwritten, for which a full drive has no space. Ours need neither. Elsewhere the
// flag is refused or means nothing.
void BlockFile::ask_in_place() {
  int flags = 0;
  if (::ioctl(descriptor_, FS_IOC_GETFLAGS, &flags) != 0) return;
  flags |= FS_NOCOW_FL;
  ::ioctl(descriptor_, FS_IOC_SETFLAGS, &flags);
}

// Direct I/O, and what it wants of offset, length and address.
void BlockFile::ask_direct(const std::string& path) {
  struct statfs system {};
  if (::fstatfs(descriptor_, &system) == 0 && system.f_type == TMPFS_MAGIC) {
    info_.direct_note = "the file lies in RAM (tmpfs)";
    return;
  }
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

// Some file systems accept the flag and refuse the transfer. The file is new: nothing is lost by
// writing its first block.
void BlockFile::probe_direct(const IoFileOptions& options) {
  const auto block = make_block(info_.alignment);
  const auto write = [&] { return ::pwrite(descriptor_, block.get(), info_.alignment, 0); };
  if (uninterrupted(write) >= 0) return probe_read(options.path);
  if (errno == ENOSPC || errno == EDQUOT) throw no_space(options, errno);
  if (!refuses_direct(errno)) throw failure("writing the first block of", options.path, errno);
  do_without_direct(options.path);
}

// Any other error is left to whoever needs that block.
void BlockFile::probe_read(const std::string& path) {
  const auto block = make_block(info_.alignment);
  const auto read = [&] { return ::pread(descriptor_, block.get(), info_.alignment, 0); };
  if (uninterrupted(read) < 0 && refuses_direct(errno)) do_without_direct(path);
}

void BlockFile::do_without_direct(const std::string& path) {
  if (leave_direct("the file system refuses direct transfers; the page cache is used")) return;
  throw failure("leaving direct I/O on", path, errno);
}

bool BlockFile::leave_direct(const std::string& note) {
  if (!set_direct(false)) return false;
  info_.direct = false;
  info_.direct_note = note;
  return true;
}

}  // namespace terrace
