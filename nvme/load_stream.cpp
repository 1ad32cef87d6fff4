#include "nvme/load_stream.h"

#include <algorithm>
#include <string>

#include "terrace/error.h"

namespace terrace::bench {
namespace {

constexpr std::uint64_t kRunParameters = std::uint64_t{1} << 20;
constexpr std::uint64_t kLayerBytes = std::uint64_t{64} << 20;
constexpr std::uint64_t kCommitBytes = std::uint64_t{32} << 20;

// Goes round and round a region in blocks.
class Walk {
 public:
  Walk(LoadRegion region, std::uint64_t block, std::uint64_t start)
      : region_(region),
        block_(block),
        blocks_(std::max<std::uint64_t>(1, region.bytes() / block)),
        at_(start % blocks_) {}
  LoadRequest next(IoOperation operation, std::uint64_t group) {
    const LoadRequest request{operation, region_.begin + at_ * block_, block_, group};
    at_ = at_ + 1 == blocks_ ? 0 : at_ + 1;
    return request;
  }

 private:
  LoadRegion region_;
  std::uint64_t block_;
  std::uint64_t blocks_;
  std::uint64_t at_;
};

class Sequential final : public LoadStream {
 public:
  Sequential(IoOperation operation, LoadRegion region, std::uint64_t block, std::uint64_t start)
      : operation_(operation), walk_(region, block, start) {}
  std::optional<LoadRequest> next() override { return walk_.next(operation_, 0); }

 private:
  IoOperation operation_;
  Walk walk_;
};

class FirstWrite final : public LoadStream {
 public:
  FirstWrite(LoadRegion region, std::uint64_t block)
      : at_(region.begin), end_(region.end), block_(block) {}
  std::optional<LoadRequest> next() override {
    if (at_ >= end_) return std::nullopt;
    const LoadRequest request{IoOperation::write, at_, std::min(block_, end_ - at_), 0};
    at_ += request.bytes;
    return request;
  }

 private:
  std::uint64_t at_;
  std::uint64_t end_;
  std::uint64_t block_;
};

class Mix final : public LoadStream {
 public:
  Mix(LoadRegion region, std::uint64_t block, std::uint64_t start)
      : reads_(region, block, start),
        writes_(region, block, start + std::max<std::uint64_t>(1, region.bytes() / block / 2)) {}
  std::optional<LoadRequest> next() override {
    write_ = !write_;
    return write_ ? writes_.next(IoOperation::write, 0) : reads_.next(IoOperation::read, 0);
  }

 private:
  Walk reads_;
  Walk writes_;
  bool write_ = true;
};

// Cuts an extent into blocks; the last one may be shorter.
class Pieces {
 public:
  void begin(IoOperation operation, std::uint64_t offset, std::uint64_t bytes) {
    operation_ = operation;
    offset_ = offset;
    left_ = bytes;
  }
  bool empty() const { return left_ == 0; }
  LoadRequest next(std::uint64_t block, std::uint64_t group) {
    const auto bytes = std::min(block, left_);
    const LoadRequest request{operation_, offset_, bytes, group};
    offset_ += bytes;
    left_ -= bytes;
    return request;
  }

 private:
  IoOperation operation_ = IoOperation::read;
  std::uint64_t offset_ = 0;
  std::uint64_t left_ = 0;
};

// Runs of parameters: [states, 12 bytes each][parameters, 2 bytes each], read and written as
// R0 R1 R2, then W0 R3 W1 R4 and so on. A write needs its read, and a read the buffer of an earlier
// write: once under way, both are 2·kWindow − 1 groups back.
class OptimizerStep final : public LoadStream {
 public:
  OptimizerStep(LoadRegion region, std::uint64_t block, std::uint64_t start)
      : region_(region), block_(block) {
    const std::uint64_t align = region.alignment;
    const auto fitting = region.bytes() / OptimizerTraffic::kWrittenPerParameter / 4;
    parameters_ = std::max(align, std::min(kRunParameters, fitting / align * align));
    runs_ = std::max<std::uint64_t>(
        1, region.bytes() / (OptimizerTraffic::kWrittenPerParameter * parameters_));
    read_ = write_ = start % runs_;
  }
  std::uint64_t lag() const override { return 2 * OptimizerTraffic::kWindow - 1; }
  std::optional<LoadRequest> next() override {
    if (pieces_.empty()) begin_group();
    return pieces_.next(block_, groups_);
  }

 private:
  void begin_group() {
    const bool write = started_ >= OptimizerTraffic::kWindow && !wrote_;
    wrote_ = write;
    auto& run = write ? write_ : read_;
    const auto bytes = parameters_ * (write ? OptimizerTraffic::kWrittenPerParameter
                                            : OptimizerTraffic::kReadPerParameter);
    pieces_.begin(write ? IoOperation::write : IoOperation::read,
                  region_.begin + run * parameters_ * OptimizerTraffic::kWrittenPerParameter,
                  bytes);
    run = run + 1 == runs_ ? 0 : run + 1;
    if (!write) ++started_;
    ++groups_;
  }

  LoadRegion region_;
  std::uint64_t block_;
  std::uint64_t parameters_ = 0;  // of a run
  std::uint64_t runs_ = 0;
  std::uint64_t read_ = 0;
  std::uint64_t write_ = 0;
  std::uint64_t started_ = 0;  // reads
  std::uint64_t groups_ = 0;
  bool wrote_ = false;
  Pieces pieces_;
};

class LayerPrefetch final : public LoadStream {
 public:
  LayerPrefetch(LoadRegion region, std::uint64_t block, std::uint64_t start)
      : region_(region), block_(block) {
    const std::uint64_t align = region.alignment;
    layer_ = std::max(align, std::min(kLayerBytes, region.bytes() / 4 / align * align));
    layers_ = std::max<std::uint64_t>(1, region.bytes() / layer_);
    at_ = start % layers_;
  }
  std::uint64_t lag() const override { return 2; }
  std::optional<LoadRequest> next() override {
    if (pieces_.empty()) {
      pieces_.begin(IoOperation::read, region_.begin + at_ * layer_, layer_);
      at_ = at_ + 1 == layers_ ? 0 : at_ + 1;
      ++groups_;
    }
    return pieces_.next(block_, groups_);
  }

 private:
  LoadRegion region_;
  std::uint64_t block_;
  std::uint64_t layer_ = 0;
  std::uint64_t layers_ = 0;
  std::uint64_t at_ = 0;
  std::uint64_t groups_ = 0;
  Pieces pieces_;
};

class Commit final : public LoadStream {
 public:
  Commit(LoadRegion region, std::uint64_t block, std::uint64_t start)
      : align_(region.alignment),
        region_{region.begin + align_, region.end, region.alignment},
        block_(block) {
    data_ = std::max(align_, std::min(kCommitBytes, region_.bytes() / 4 / align_ * align_));
    places_ = std::max<std::uint64_t>(1, region_.bytes() / data_);
    at_ = start % places_;
  }
  std::uint64_t lag() const override { return 1; }
  std::optional<LoadRequest> next() override {
    if (!pieces_.empty()) return pieces_.next(block_, groups_);
    ++groups_;
    switch (phase_++ % 4) {
      case 0:
        pieces_.begin(IoOperation::write, region_.begin + at_ * data_, data_);
        at_ = at_ + 1 == places_ ? 0 : at_ + 1;
        return pieces_.next(block_, groups_);
      case 2: return LoadRequest{IoOperation::write, region_.begin - align_, align_, groups_};
      default: return LoadRequest{IoOperation::flush, 0, 0, groups_};
    }
  }

 private:
  std::uint64_t align_;
  LoadRegion region_;  // without its first page, the record
  std::uint64_t block_;
  std::uint64_t data_ = 0;
  std::uint64_t places_ = 0;
  std::uint64_t at_ = 0;
  std::uint64_t groups_ = 0;
  std::uint64_t phase_ = 0;
  Pieces pieces_;
};

}  // namespace

std::string_view to_string(Pattern pattern) {
  switch (pattern) {
    case Pattern::read: return "read";
    case Pattern::overwrite: return "overwrite";
    case Pattern::first_write: return "first_write";
    case Pattern::mix: return "mix";
    case Pattern::optimizer_step: return "optimizer_step";
    case Pattern::layer_prefetch: return "layer_prefetch";
    case Pattern::commit: return "commit";
    case Pattern::sustained_write: return "sustained_write";
  }
  return "";
}

Pattern parse_pattern(std::string_view text) {
  std::string known;
  for (const Pattern pattern : kPatterns) {
    if (text == to_string(pattern)) return pattern;
    known += (known.empty() ? "" : ", ") + std::string(to_string(pattern));
  }
  throw Error(ErrorCode::invalid_argument,
              "'" + std::string(text) + "' is no pattern; there are " + known);
}

bool writes(Pattern pattern) {
  return pattern != Pattern::read && pattern != Pattern::layer_prefetch;
}

std::unique_ptr<LoadStream> make_stream(Pattern pattern, LoadRegion region,
                                        std::uint64_t block_bytes, std::uint64_t start) {
  TERRACE_CHECK(block_bytes >= region.alignment && region.bytes() >= 2 * block_bytes);
  switch (pattern) {
    case Pattern::read:
      return std::make_unique<Sequential>(IoOperation::read, region, block_bytes, start);
    case Pattern::overwrite:
    case Pattern::sustained_write:
      return std::make_unique<Sequential>(IoOperation::write, region, block_bytes, start);
    case Pattern::first_write: return std::make_unique<FirstWrite>(region, block_bytes);
    case Pattern::mix: return std::make_unique<Mix>(region, block_bytes, start);
    case Pattern::optimizer_step:
      return std::make_unique<OptimizerStep>(region, block_bytes, start);
    case Pattern::layer_prefetch:
      return std::make_unique<LayerPrefetch>(region, block_bytes, start);
    case Pattern::commit: return std::make_unique<Commit>(region, block_bytes, start);
  }
  TERRACE_CHECK(false);
  return nullptr;
}

}  // namespace terrace::bench
