#include "tools/text_data.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>

#include "terrace/error.h"

namespace terrace::gpt {
namespace {

namespace fs = std::filesystem;

bool hidden(const fs::path& path) { return path.filename().string().starts_with('.'); }

// A link that leads nowhere is no file.
std::vector<std::string> files_below(const std::string& directory) {
  std::vector<std::string> files;
  try {
    for (auto it = fs::recursive_directory_iterator(
             directory, fs::directory_options::skip_permission_denied);
         it != fs::recursive_directory_iterator(); ++it) {
      std::error_code dangling;
      if (hidden(it->path())) {
        if (it->is_directory(dangling)) it.disable_recursion_pending();
      } else if (it->is_regular_file(dangling)) {
        files.push_back(it->path().string());
      }
    }
  } catch (const fs::filesystem_error& error) {
    throw Error(ErrorCode::io, "the data directory " + directory + " cannot be listed (" +
                                   error.code().message() + "); check its drive");
  }
  std::sort(files.begin(), files.end());
  return files;
}

// Nothing when the file cannot be opened or a read fails.
std::optional<std::string> read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  std::string content;
  std::array<char, 1 << 16> piece;
  while (file.read(piece.data(), piece.size()) || file.gcount() > 0) {
    content.append(piece.data(), static_cast<std::size_t>(file.gcount()));
  }
  if (file.bad()) return std::nullopt;
  return content;
}

}  // namespace

TextData::TextData(const std::string& path) : path_(path) {
  std::error_code error;
  const auto status = fs::status(path, error);
  if (!fs::exists(status)) {
    throw Error(ErrorCode::invalid_argument,
                "the data " + path + " does not exist; name a text file or a directory");
  }
  if (fs::is_directory(status)) {
    for (const auto& file : files_below(path)) append_file(file, false);
  } else {
    append_file(path, true);
  }
  if (text_.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "the data " + path + " holds no text; name a file or directory with some");
  }
}

void TextData::append_file(const std::string& path, bool must) {
  const auto content = read_file(path);
  if (!content && must) {
    throw Error(ErrorCode::io, "the data file " + path + " cannot be read; check its permissions");
  }
  if (!content || (!must && content->find('\0') != std::string::npos)) return;
  text_ += *content;
  ++files_;
}

void TextData::require_context(std::uint32_t context) const {
  if (text_.size() >= std::uint64_t{context} + 1) return;
  throw Error(ErrorCode::invalid_argument,
              "the data " + path_ + " holds " + std::to_string(text_.size()) +
                  " bytes and a context of " + std::to_string(context) + " needs at least " +
                  std::to_string(context + 1) + "; use a shorter --context or more data");
}

TextData::Batch TextData::batch(const GptConfig& config, std::uint64_t number) const {
  require_context(config.context);
  Batch result;
  const std::uint64_t starts = text_.size() - config.context;
  const std::uint64_t stream = mix(config.seed, number);
  for (std::uint32_t row = 0; row < config.batch; ++row) {
    const std::uint64_t first = mix(stream, row) % starts;
    for (std::uint64_t t = first; t < first + config.context; ++t) {
      result.inputs.push_back(static_cast<unsigned char>(text_[t]));
      result.targets.push_back(static_cast<unsigned char>(text_[t + 1]));
    }
  }
  return result;
}

std::vector<TextData::Batch> TextData::step(const GptConfig& config, std::uint64_t number,
                                            std::uint32_t micro_batches) const {
  std::vector<Batch> batches;
  for (std::uint64_t m = 1; m <= micro_batches; ++m) {
    batches.push_back(batch(config, (number - 1) * micro_batches + m));
  }
  return batches;
}

double mean(const std::vector<double>& losses) {
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size());
}

std::uint64_t TextData::hash() const { return XXH3_64bits(text_.data(), text_.size()); }

double TextData::order0_entropy() const {
  std::array<double, kVocabulary> counts{};
  for (const char c : text_) counts[static_cast<unsigned char>(c)] += 1;
  double entropy = 0;
  for (const double count : counts) {
    const double share = count / static_cast<double>(text_.size());
    if (share > 0) entropy -= share * std::log2(share);
  }
  return entropy;
}

}  // namespace terrace::gpt
