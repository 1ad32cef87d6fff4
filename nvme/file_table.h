// The files that an engine has open, by id.
#pragma once

#include <optional>
#include <vector>

#include "nvme/block_file.h"
#include "terrace/error.h"

namespace terrace {

// Thread rule: the engine's owner.
class FileTable {
 public:
  FileId open(const IoFileOptions& options) {
    std::size_t index = 0;
    while (index < files_.size() && files_[index]) ++index;
    if (index == kMaxIoFiles) {
      throw Error(ErrorCode::unavailable, "opening " + options.path + ": " +
                                              std::to_string(kMaxIoFiles) +
                                              " files are open already");
    }
    if (index == files_.size()) files_.emplace_back();
    files_[index].emplace(options);
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

 private:
  std::vector<std::optional<BlockFile>> files_;
};

}  // namespace terrace
