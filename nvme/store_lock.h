// One run at a time in a directory.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace terrace {

// Holds directory/terrace.lock, which says who: process, host, start time. The kernel lets go of it
// when the owner ends, however it ends; the file of a dead owner is taken over.
// Thread rule: one thread.
class StoreLock {
 public:
  // Waits briefly for an owner that is just ending. Throws Error(unavailable) naming the owner when
  // it lives on or when that name is no file, Error(io) when the file cannot be made.
  explicit StoreLock(const std::string& directory);
  ~StoreLock();
  StoreLock(StoreLock&& other) noexcept;
  StoreLock& operator=(StoreLock&&) = delete;

 private:
  std::string path_;
  int descriptor_ = -1;
};

// Under two names a directory would keep out itself, or pass for two drives. Throws
// Error(invalid_argument).
void refuse_one_directory_twice(const std::vector<std::string>& directories);

// Who holds the lock of `directory`, if anyone does; creates and changes nothing.
std::optional<std::string> lock_holder(const std::string& directory);

}  // namespace terrace
