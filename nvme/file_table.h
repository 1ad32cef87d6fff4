// The files that an engine has open, by id.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "nvme/block_file.h"
#include "nvme/transfers.h"
#include "terrace/error.h"

namespace terrace {

// Throws Error(invalid_argument) when the file names a drive that the engine does not have.
inline void check_drive(const IoFileOptions& options, std::uint32_t drives) {
  if (options.drive < drives) return;
  throw Error(ErrorCode::invalid_argument,
              "opening " + options.path + " on drive " + std::to_string(options.drive) +
                  ": the engine was made for " + std::to_string(drives) +
                  " drives, counted from 0; ask for more when making it");
}

inline Error too_many_files(const IoFileOptions& options) {
  return {ErrorCode::unavailable, "opening " + options.path + ": " + std::to_string(kMaxIoFiles) +
                                      " files are open already; close one first"};
}

// Thread rule: the engine's owner.
class FileTable {
 public:
  explicit FileTable(std::uint32_t drives) : drives_(drives) {}

  FileId open(const IoFileOptions& options) {
    check_drive(options, drives_);
    std::size_t index = 0;
    while (index < files_.size() && files_[index]) ++index;
    if (index == kMaxIoFiles) throw too_many_files(options);
    if (index == files_.size()) files_.emplace_back();
    const auto& note = files_[index].emplace(options).reserve_note();
    if (!note.empty() && std::find(notes_.begin(), notes_.end(), note) == notes_.end()) {
      notes_.push_back(note);
    }
    return {static_cast<std::uint32_t>(index)};
  }
  void close(FileId file) {
    at(file);
    files_[file.value].reset();
  }
  const BlockFile& at(FileId file) const {
    TERRACE_CHECK(file.value < files_.size() && files_[file.value].has_value());
    return *files_[file.value];
  }
  // After a direct transfer was refused: whether it and all to come can use the page cache.
  bool leave_direct(FileId file) {
    auto& left = *files_[file.value];
    if (!left.info().direct) return true;  // an earlier transfer has seen to it
    if (!left.leave_direct("the file system began to refuse direct transfers; the page cache is "
                           "used")) {
      return false;
    }
    notes_.push_back(left.info().path + ": " + left.info().direct_note);
    return true;
  }
  // `notes`, and what the files had to do without, each said once.
  std::vector<std::string> add_notes(std::vector<std::string> notes) const {
    notes.insert(notes.end(), notes_.begin(), notes_.end());
    return notes;
  }

 private:
  const std::uint32_t drives_;
  std::vector<std::optional<BlockFile>> files_;
  std::vector<std::string> notes_;
};

// TransferTable::advance(), with a second try through the page cache for a direct transfer that the
// file system refuses although it is aligned.
inline bool settle(TransferTable& table, FileTable& files, int slot, std::int64_t result,
                   Nanoseconds now) {
  if (refuses_direct(static_cast<int>(-result)) && table.may_blame_direct(slot) &&
      files.leave_direct(table.at(slot).file)) {
    return true;
  }
  return table.advance(slot, result, now);
}

}  // namespace terrace
