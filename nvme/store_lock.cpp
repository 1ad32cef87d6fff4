#include "nvme/store_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <thread>
#include <utility>

#include "terrace/error.h"

namespace terrace {
namespace {

constexpr auto kPatience = std::chrono::seconds(2);  // a dead owner's lock lingers for some 50 ms
constexpr auto kPause = std::chrono::milliseconds(20);

std::string owner() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  ::gmtime_r(&now, &utc);
  std::array<char, 32> time{};
  std::strftime(time.data(), time.size(), "%Y-%m-%d %H:%M:%S UTC", &utc);
  return "process " + std::to_string(::getpid()) + " on " + host.data() + " since " + time.data();
}

std::string read_owner(int descriptor) {
  std::array<char, 512> text{};
  const auto count = ::pread(descriptor, text.data(), text.size() - 1, 0);
  return count > 0 ? std::string(text.data(), static_cast<std::size_t>(count)) : "another process";
}

// The file behind the descriptor still has this name: its last owner may have removed it.
bool still_named(int descriptor, const std::string& path) {
  struct stat open_file {};
  struct stat named {};
  return ::fstat(descriptor, &open_file) == 0 && ::stat(path.c_str(), &named) == 0 &&
         open_file.st_ino == named.st_ino && open_file.st_dev == named.st_dev;
}

// What is no file of ours is not locked, and above all not removed.
void refuse_no_file(const std::string& lock) {
  struct stat found {};
  if (::lstat(lock.c_str(), &found) != 0 || S_ISREG(found.st_mode)) return;
  throw Error(ErrorCode::unavailable,
              lock + " is no file; move it away, or name another directory");
}

// The lock is the directory's: a store that another directory names too would not be covered.
void refuse_other_names(const std::string& store) {
  struct stat found {};
  if (::lstat(store.c_str(), &found) != 0) return;
  std::string what;
  if (S_ISLNK(found.st_mode)) {
    what = " is a symbolic link; name the directory that holds the store itself";
  } else if (!S_ISREG(found.st_mode)) {
    what = " is no file; move it away, or name another directory";
  } else if (found.st_nlink > 1) {
    what = " has another name as well (a hard link); remove that, or copy the store";
  }
  if (!what.empty()) throw Error(ErrorCode::unavailable, store + what);
}

}  // namespace

StoreLock::StoreLock(const std::string& directory) : path_(directory + "/terrace.lock") {
  const auto until = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    refuse_no_file(path_);
    descriptor_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (descriptor_ < 0) {
      throw Error(ErrorCode::io, "opening the lock " + path_ + " failed: " +
                                     std::strerror(errno) +
                                     "; make its directory writable or name another one");
    }
    const bool locked = ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0;
    if (locked && still_named(descriptor_, path_)) break;
    const int error = locked ? 0 : errno;
    const std::string holder = read_owner(descriptor_);
    ::close(std::exchange(descriptor_, -1));
    if (error != 0 && error != EWOULDBLOCK && error != EINTR) {
      throw Error(ErrorCode::io, "locking " + path_ + " failed: " + std::strerror(error) +
                                     "; name a directory on a local file system");
    }
    if (std::chrono::steady_clock::now() >= until) {
      throw Error(ErrorCode::unavailable, directory + " is in use by " + holder +
                                              "; wait for it, or name another directory");
    }
    std::this_thread::sleep_for(kPause);
  }
  try {
    refuse_other_names(directory + "/terrace.store");
  } catch (...) {
    ::unlink(path_.c_str());
    ::close(descriptor_);
    throw;
  }
  // Who holds it is a courtesy to the next one; a full disk must not keep us out.
  const std::string text = owner();
  [[maybe_unused]] const int cut = ::ftruncate(descriptor_, 0);
  [[maybe_unused]] const auto written = ::pwrite(descriptor_, text.data(), text.size(), 0);
}

StoreLock::StoreLock(StoreLock&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

StoreLock::~StoreLock() {
  if (descriptor_ < 0) return;
  // While it is held: the next owner makes a new one. Not when somebody took it away, and another
  // run has made its own.
  if (still_named(descriptor_, path_)) ::unlink(path_.c_str());
  ::close(descriptor_);
}

void refuse_one_directory_twice(const std::vector<std::string>& directories) {
  std::vector<struct stat> seen(directories.size());
  for (std::size_t d = 0; d < directories.size(); ++d) {
    if (::stat(directories[d].c_str(), &seen[d]) != 0) continue;  // whoever opens it will say so
    for (std::size_t other = 0; other < d; ++other) {
      if (seen[d].st_ino != seen[other].st_ino || seen[d].st_dev != seen[other].st_dev) continue;
      throw Error(ErrorCode::invalid_argument,
                  directories[other] + " and " + directories[d] +
                      " are one directory; name each drive once");
    }
  }
}

// An attempt that shares: whoever begins at this instant waits for it.
std::optional<std::string> lock_holder(const std::string& directory) {
  const std::string path = directory + "/terrace.lock";
  // Without O_NONBLOCK a fifo of that name would wait for a writer.
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return {};
  std::optional<std::string> holder;
  if (::flock(descriptor, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    holder = read_owner(descriptor);
  }
  ::close(descriptor);
  return holder;
}

}  // namespace terrace
