// Text as training data: bytes of a file or of all text files below a directory.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/gpt_model.h"

namespace terrace::gpt {

// Immutable once loaded.
class TextData {
 public:
  // Directories are read recursively in sorted order; hidden entries, unreadable files and files
  // with a zero byte are skipped. Throws Error(invalid_argument) that names the path when it is
  // missing or holds nothing, Error(io) when it cannot be read.
  explicit TextData(const std::string& path);

  // Throws Error(invalid_argument) with both numbers when no sequence of the context's length fits.
  void require_context(std::uint32_t context) const;

  struct Batch {
    std::vector<std::int32_t> inputs;   // [batch, context]
    std::vector<std::int32_t> targets;  // [batch, context]: the bytes that follow
  };
  // The n-th one. Depends on (config.seed, number) alone. Throws like require_context().
  Batch batch(const GptConfig& config, std::uint64_t number) const;
  // Those of the n-th step, counted from 1, when each has `micro_batches` of them.
  std::vector<Batch> step(const GptConfig& config, std::uint64_t number,
                          std::uint32_t micro_batches) const;

  // Bits per byte of the best guess that ignores the past.
  double order0_entropy() const;
  std::uint64_t bytes() const { return text_.size(); }
  std::uint64_t hash() const;  // of the text
  std::uint64_t files() const { return files_; }
  const std::string& text() const { return text_; }

 private:
  void append_file(const std::string& path, bool must);

  std::string path_;
  std::string text_;
  std::uint64_t files_ = 0;
};

// Of the losses of equally large micro-batches.
double mean(const std::vector<double>& losses);

}  // namespace terrace::gpt
