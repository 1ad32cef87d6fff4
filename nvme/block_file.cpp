#include "nvme/block_file.h"

#include <fcntl.h>
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

std::string directory_of(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

std::string remedy(int error, const std::string& path) {
  switch (error) {
    case ENOENT: return "create the directory " + directory_of(path) + " or name another one";
    case EACCES:
    case EPERM: return "make " + directory_of(path) + " writable or name another directory";
    case EROFS: return "its file system is read-only; name a directory on another one";
    case EEXIST: return "another run uses it or left it; remove it if no process does";
    case ENOTDIR: return directory_of(path) + " is no directory; name one";
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
                             ". Free space, lower the nvme budget or name another directory"};
}

}  // namespace

BlockFile::BlockFile(const IoFileOptions& options) {
  info_.path = options.path;
  info_.size = options.size;
  create(options);
  try {
    reserve(options);
    if (info_.direct) probe_direct();
  } catch (...) {
    close_descriptor();
    if (!options.scratch) ::unlink(options.path.c_str());
    throw;
  }
}

BlockFile::~BlockFile() { close_descriptor(); }

BlockFile::BlockFile(BlockFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)), info_(std::move(other.info_)) {}

void BlockFile::close_descriptor() noexcept {
  if (descriptor_ >= 0) ::close(std::exchange(descriptor_, -1));
}

// O_TMPFILE where the file system has it; elsewhere a name that exists for a moment.
void BlockFile::create(const IoFileOptions& options) {
  const int base = O_RDWR | O_CLOEXEC;
  const auto open_with = [&](int extra) {
    if (!options.scratch) {
      return ::open(options.path.c_str(), base | O_CREAT | O_EXCL | extra, 0600);
    }
    int descriptor = ::open(directory_of(options.path).c_str(), base | O_TMPFILE | extra, 0600);
    if (descriptor < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) {
      descriptor = ::open(options.path.c_str(), base | O_CREAT | O_EXCL | extra, 0600);
      if (descriptor >= 0) ::unlink(options.path.c_str());
    }
    return descriptor;
  };
  descriptor_ = open_with(options.direct ? O_DIRECT : 0);
  info_.direct = options.direct && descriptor_ >= 0;
  if (descriptor_ < 0 && options.direct && errno == EINVAL) {
    info_.direct_note = "the file system refuses O_DIRECT; the page cache is used";
    descriptor_ = open_with(0);
  }
  if (descriptor_ < 0) throw failure("creating", options.path, errno);
  if (options.scratch) {
    info_.path = "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(descriptor_);
  }
  if (!options.direct) info_.direct_note = "not asked for";
}

void BlockFile::reserve(const IoFileOptions& options) {
  const auto size = static_cast<off_t>(options.size.count);
  if (size == 0) return;
  int result = 0;
  do {
    result = ::fallocate(descriptor_, 0, 0, size);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return;
  if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG) throw no_space(options, errno);
  if (errno != EOPNOTSUPP) throw failure("reserving space for", options.path, errno);
  if (::ftruncate(descriptor_, size) != 0) throw failure("sizing", options.path, errno);
}

// What the file wants of offset, length and address; and whether it really takes direct I/O: some
// file systems accept the flag and refuse the transfer.
void BlockFile::probe_direct() {
  info_.alignment = kLeastAlignment;
#ifdef STATX_DIOALIGN
  struct statx status {};
  if (::statx(descriptor_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 &&
      (status.stx_mask & STATX_DIOALIGN) != 0) {
    info_.alignment = std::max({info_.alignment, status.stx_dio_mem_align,
                                status.stx_dio_offset_align});
  }
#endif
  if (info_.size.count < info_.alignment) return;
  const std::unique_ptr<void, void (*)(void*)> block(
      std::aligned_alloc(info_.alignment, info_.alignment), std::free);
  TERRACE_CHECK(block != nullptr);
  std::memset(block.get(), 0, info_.alignment);
  if (::pwrite(descriptor_, block.get(), info_.alignment, 0) >= 0) return;
  if (errno != EINVAL) throw failure("writing the first block of", info_.path, errno);
  const int flags = ::fcntl(descriptor_, F_GETFL);
  if (flags < 0 || ::fcntl(descriptor_, F_SETFL, flags & ~O_DIRECT) != 0) {
    throw failure("leaving direct I/O on", info_.path, errno);
  }
  info_.direct = false;
  info_.direct_note = "the file system refuses direct transfers; the page cache is used";
}

}  // namespace terrace
