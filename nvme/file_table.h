// The files that an engine has open, by id.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "nvme/block_file.h"
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

}  // namespace terrace
