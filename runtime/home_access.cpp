#include "runtime/home_access.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "terrace/error.h"

namespace terrace {
namespace {

constexpr Bytes kMaxBounce = 4_MiB;
constexpr std::uint64_t kInitialElements = 1 << 16;  // created at a time

std::span<std::byte> bounce_of(const MemoryMap& map, const TensorStore& store) {
  const Bytes first = at(map.resident, Tier::dram);
  const Bytes size = std::min(at(map.peak, Tier::dram) - first, kMaxBounce);
  return store.arena().subspan(first.count, size.count / kPage.count * kPage.count);
}

}  // namespace

HomeAccess::HomeAccess(const ModelLayout& layout, const MemoryMap& map, const TensorStore& store,
                       Device& device, IoEngine& io, FileId file)
    : layout_(layout),
      map_(map),
      store_(store),
      device_(device),
      io_(io),
      file_(file),
      bounce_(bounce_of(map, store)) {}

std::byte* HomeAccess::home_address(const HomePiece& piece, Bytes offset) const {
  return store_.address(piece.tier, piece.extent) + (offset - piece.data_offset).count;
}

void HomeAccess::copy(StreamId stream, std::byte* destination, const std::byte* source,
                      Bytes size) {
  device_.copy(stream, {Ticket{}, destination, source, size});
  device_.synchronize(stream);
  std::vector<Completion> completions;
  while (device_.poll(completions) == 0) device_.synchronize(stream);
  if (completions.front().error != 0) {
    throw Error(ErrorCode::device, "a copy of " + std::to_string(size.count) +
                                       " bytes failed: " + device_.failure());
  }
}

void HomeAccess::transfer(IoOperation operation, Bytes offset, std::span<std::byte> memory) {
  const IoRequest request{Ticket{}, operation, file_, offset.count, memory.data(), memory.size()};
  TERRACE_CHECK(io_.submit(request));
  io_.flush();
  std::vector<Completion> completions;
  while (completions.empty()) io_.reap(completions, std::chrono::milliseconds(100));
  if (completions.front().error != 0) {
    throw Error(ErrorCode::io,
                std::string(operation == IoOperation::read ? "reading " : "writing ") +
                    std::to_string(memory.size()) + " bytes at offset " +
                    std::to_string(offset.count) + " of " + io_.file_info(file_).path +
                    " failed: " + std::strerror(completions.front().error));
  }
}

void HomeAccess::read(Content content, LayerId layer, Bytes offset, Bytes size,
                      const Piece& piece) {
  for (const auto& home : map_.homes.of(content, layer)) {
    const Bytes home_end = home.data_offset + home.extent.size;
    Bytes position = std::max(offset, home.data_offset);
    const Bytes end = std::min(offset + size, home_end);
    while (position < end) {
      // Whole pages are moved; only the wanted part is handed out.
      const Bytes first = position / kPage.count * kPage.count;
      const Bytes last = std::min({round_up(end, kPage), home_end, first + Bytes{bounce_.size()}});
      const auto bounce = bounce_.first((last - first).count);
      const std::byte* bytes = bounce.data();
      if (home.tier == Tier::dram) {
        bytes = home_address(home, first);
      } else if (home.tier == Tier::hbm) {
        copy(kDeviceToHostStream, bounce.data(), home_address(home, first), last - first);
      } else {
        transfer(IoOperation::read, home.extent.offset + (first - home.data_offset), bounce);
      }
      const Bytes stop = std::min(last, end);
      piece({bytes + (position - first).count, (stop - position).count}, position);
      position = stop;
    }
  }
}

void HomeAccess::write_piece(const HomePiece& piece, Bytes offset,
                             std::span<const std::byte> bytes) {
  if (piece.tier == Tier::dram) {
    std::memcpy(home_address(piece, offset), bytes.data(), bytes.size());
    return;
  }
  for (std::size_t done = 0; done < bytes.size();) {
    const std::size_t size = std::min(bounce_.size(), bytes.size() - done);
    const auto bounce = bounce_.first(size);
    std::memcpy(bounce.data(), bytes.data() + done, size);
    const Bytes position = offset + Bytes{done};
    if (piece.tier == Tier::hbm) {
      copy(kHostToDeviceStream, home_address(piece, position), bounce.data(), {size});
    } else {
      transfer(IoOperation::write, piece.extent.offset + (position - piece.data_offset), bounce);
    }
    done += size;
  }
}

// `offset` and the size are whole pages.
void HomeAccess::write(Content content, LayerId layer, Bytes offset,
                       std::span<const std::byte> bytes) {
  for (const auto& home : map_.homes.of(content, layer)) {
    const Bytes first = std::max(offset, home.data_offset);
    const Bytes end =
        std::min(offset + Bytes{bytes.size()}, home.data_offset + home.extent.size);
    if (first < end) {
      write_piece(home, first, bytes.subspan((first - offset).count, (end - first).count));
    }
  }
}

void HomeAccess::initialize(const Initializer& initializer) {
  for (std::uint32_t l = 0; l < layout_.layers(); ++l) initialize_layer(LayerId{l}, initializer);
}

void HomeAccess::initialize_layer(LayerId layer, const Initializer& initializer) {
  const auto& block = layout_.block(layer);
  const auto& tensors = layout_.layer(layer).tensors;
  std::vector<float> values;
  std::vector<bfloat16> narrow;
  for (std::uint64_t first = 0; first < block.elements; first += kInitialElements) {
    const std::uint64_t count = std::min(kInitialElements, block.elements - first);
    values.assign(count, 0.0F);
    const Bytes wide_offset{first * sizeof(float)};
    for (const Content moment : {Content::momentum, Content::variance}) {
      write(moment, layer, wide_offset, std::as_bytes(std::span(values)));
    }
    for (std::size_t t = 0; t < tensors.size(); ++t) {
      const auto begin = std::max(first, block.tensors[t].first);
      const auto end = std::min(first + count, block.tensors[t].end());
      if (begin >= end) continue;
      initializer(tensors[t], begin - block.tensors[t].first,
                  std::span(values).subspan(begin - first, end - begin));
    }
    if (layout_.model().parameter_dtype == DType::bf16) {
      narrow.resize(count);
      std::transform(values.begin(), values.end(), narrow.begin(), to_bfloat16);
      write(Content::parameter, layer, {first * sizeof(bfloat16)},
            std::as_bytes(std::span(narrow)));
    } else {
      write(Content::parameter, layer, wide_offset, std::as_bytes(std::span(values)));
    }
    write(Content::master_weight, layer, wide_offset, std::as_bytes(std::span(values)));
  }
}

}  // namespace terrace
