// A step as data: every transfer, update and layer use, where its bytes lie, and what it waits for.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/schedule.h"
#include "terrace/forecast.h"
#include "terrace/types.h"
#include "tiers/block_layout.h"

namespace terrace {

enum class OpKind : std::uint8_t {
  read,      // NVMe → DRAM
  write,     // DRAM → NVMe
  upload,    // DRAM → HBM
  download,  // HBM → DRAM
  update,    // Adam over a run of segments, in DRAM
  accumulate,  // adds a run's gradients to those of the micro-batches before, in DRAM
  measure,   // sums of squares of a run's gradients, and whether all are finite, in DRAM
  forward,   // the trainer's layer function, in HBM
  backward,
  commit,  // makes the durable part of NVMe current as it is
};

Lane lane_of(OpKind kind);
// Runs in a stream of the device: others in the device may wait for it without the host.
bool on_device(OpKind kind);
const char* to_string(OpKind kind);

enum class Access : std::uint8_t { read, write, read_write };
constexpr bool reads(Access access) { return access != Access::write; }
constexpr bool writes(Access access) { return access != Access::read; }

// Bytes that an operation touches.
struct Operand {
  Content content = Content::parameter;
  Tier tier = Tier::dram;
  Access access = Access::read;
  LayerId layer;      // whose content it is (an output belongs to the layer above)
  Bytes data_offset;  // of these bytes inside the content's block
  Extent extent;      // where they lie
  // Updates: the NVMe addresses of these bytes whose checksums the update makes (size 0: none), and
  // whether what it finds must match them first.
  Extent stored{};
  bool check = false;
};

struct Operation {
  OpKind kind = OpKind::read;
  LayerId layer;
  std::uint32_t first_operand = 0;
  std::uint32_t operand_count = 0;
  ElementRange elements;     // update: of the block, padding included
  Bytes bytes;               // that its lane moves; 0 for layer uses
  double flops = 0;          // layer uses
  bool pending = false;      // belongs to the step before: a cancelled pass does it all the same
  bool hashed = false;       // reads and writes: the bytes are hashed on their way; otherwise the
                             // update that they belong to does it while they are in cache
};

using OpIndex = std::uint32_t;

// Immutable once built. The order of `operations` is the planning order: every dependency points
// backward, each lane is a subsequence, and running them one by one in this order is correct.
struct StepPlan {
  LayerSchedule schedule;
  std::vector<Operation> operations;
  std::vector<Operand> operands;
  std::vector<OpIndex> uses;  // the operation of each schedule entry

  // What each operation waits for, as lists back to back: operation i's are
  // dependencies[dependency_begin[i] .. dependency_begin[i + 1]).
  std::vector<OpIndex> dependencies;
  std::vector<std::uint32_t> dependency_begin;

  std::span<const Operand> operands_of(OpIndex op) const {
    return std::span(operands).subspan(operations[op].first_operand,
                                       operations[op].operand_count);
  }
  std::span<const OpIndex> dependencies_of(OpIndex op) const {
    return std::span(dependencies)
        .subspan(dependency_begin[op], dependency_begin[op + 1] - dependency_begin[op]);
  }
};

// Where the bytes of one content of one layer live between steps: pieces in order, back to back.
struct HomePiece {
  Tier tier = Tier::dram;
  Bytes data_offset;
  Extent extent;
};
struct Homes {
  // [content][layer] for parameter, master_weight, momentum, variance, and when updates are
  // deferred for gradient, or accumulated_gradient with several micro-batches; others have none.
  std::array<std::vector<std::vector<HomePiece>>, kContentCount> pieces;
  std::span<const HomePiece> of(Content content, LayerId layer) const {
    return pieces[static_cast<std::size_t>(content)][layer.value];
  }
};

// What is reserved on every tier, for all plans of an engine: homes first, then the buffers.
struct MemoryMap {
  Homes homes;
  // NVMe addresses [0, durable) hold all optimizer states, wherever their homes are, in two slots;
  // the pieces are those of Homes when every home is on NVMe. 0: nothing is durable.
  Bytes durable;
  std::vector<Extent> gradient_sums;  // in DRAM, of a layer
  Bytes commit_bytes;  // that a commit writes about itself
  std::array<std::vector<Bytes>, kOptimizerStateCount> durable_base;  // of a layer's block
  PerTier<Bytes> resident{};             // [0, resident) holds the homes
  PerTier<Bytes> peak{};                 // [resident, peak) holds the buffers
  PerTier<ClassBytes> resident_class{};  // of resident
};

}  // namespace terrace
