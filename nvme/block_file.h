// A file that is accessed past the page cache where that is possible; a new one has its space
// reserved.
#pragma once

#include "terrace/io_engine.h"

namespace terrace {

// As IoEngine::exists() and remove() promise. Any thread.
bool file_exists(const std::string& path);
void remove_file(const std::string& path);

// Whether a file system that takes no direct transfers answers with this errno value.
bool refuses_direct(int error);

// Owns the descriptor. Thread rule: one thread; the descriptor itself may be used by several.
class BlockFile {
 public:
  // As IoEngine::open() promises; a new file's size is rounded up to the alignment. Scratch files
  // are made in the parent directory of `path` and have no name: they are gone when the last
  // descriptor is, however the process ends. info().path then leads to them through /proc.
  explicit BlockFile(const IoFileOptions& options);
  ~BlockFile();
  BlockFile(BlockFile&& other) noexcept;
  BlockFile& operator=(BlockFile&&) = delete;

  int descriptor() const { return descriptor_; }
  const IoFileInfo& info() const { return info_; }
  // Why the file's space is not reserved; empty when it is.
  const std::string& reserve_note() const { return reserve_note_; }
  // Goes on through the page cache, because of `note`. False when the system refuses that as well.
  bool leave_direct(const std::string& note);

 private:
  void create(const IoFileOptions& options);
  void make(const IoFileOptions& options);
  void find(const IoFileOptions& options);
  void measure(const IoFileOptions& options);
  void ask_in_place();
  void ask_direct(const std::string& path);
  void reserve(const IoFileOptions& options);
  void probe_direct(const IoFileOptions& options);
  void probe_read(const std::string& path);
  void do_without_direct(const std::string& path);
  bool set_direct(bool on);
  void close_descriptor() noexcept;

  int descriptor_ = -1;
  IoFileInfo info_;
  std::string reserve_note_;
};

}  // namespace terrace
