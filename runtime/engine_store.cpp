#include "runtime/engine_store.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <numeric>

#include "nvme/checksum.h"
#include "runtime/placement.h"
#include "runtime/store_plan.h"
#include "terrace/error.h"

namespace terrace {
namespace {

std::string remedy(const std::error_code& error) {
  if (error == std::errc::no_such_file_or_directory) return "create it or name another one";
  if (error == std::errc::permission_denied || error == std::errc::read_only_file_system) {
    return "make it writable or name another one";
  }
  return "name another one";
}

// What a store that lies there takes.
Bytes taken_in(const std::string& directory) {
  struct stat status {};
  if (::stat(store_path(directory).c_str(), &status) != 0) return {};
  return Bytes{static_cast<std::uint64_t>(status.st_blocks) * 512};
}

Bytes free_in(const NvmeConfig& drive) {
  std::error_code error;
  const auto space = std::filesystem::space(drive.path, error);
  if (!error && !std::filesystem::is_directory(drive.path, error)) {
    error = std::make_error_code(std::errc::not_a_directory);
  }
  if (!error && ::access(drive.path.c_str(), W_OK | X_OK) != 0) {
    error.assign(errno, std::system_category());
  }
  if (error) {
    throw Error(ErrorCode::io, "the nvme directory " + drive.path + " cannot be used: " +
                                   error.message() + "; " + remedy(error));
  }
  const Bytes free{space.available};
  return free - std::min(free, drive.keep_free);
}

// Names, shapes and order of all tensors.
std::uint64_t model_hash(const ModelSpec& model) {
  std::string text;
  for (const auto& layer : model.layers) {
    text.append(layer.name) += '\n';
    for (const auto& tensor : layer.tensors) {
      text.append(tensor.name);
      for (const auto size : tensor.shape) text.append(" ").append(std::to_string(size));
      text += '\n';
    }
  }
  return hash_bytes(text.data(), text.size());
}

StoreIdentity identity_of(const Config& config, const ModelSpec& model) {
  StoreIdentity identity = config.store.identity;
  if (config.loss_scale.enabled) {
    identity.emplace_back("loss_scale", config.loss_scale.constant > 0 ? "constant" : "dynamic");
  }
  identity.emplace_back("layers", std::to_string(model.layers.size()));
  identity.emplace_back("parameters", std::to_string(parameter_count(model)));
  identity.emplace_back("parameter_dtype", std::string(to_string(model.parameter_dtype)));
  identity.emplace_back("tensors (hash)", std::to_string(model_hash(model)));
  return identity;
}

// "momentum of layer 'block3', elements [0, 4096) (tensors block3.norm.weight, ...)"
class Describer {
 public:
  Describer(const ModelLayout& layout, const MemoryMap& map) : layout_(layout), map_(map) {}

  std::string operator()(Extent extent) const {
    for (const Content content : {Content::master_weight, Content::momentum, Content::variance,
                                  Content::parameter}) {
      for (std::uint32_t l = 0; l < layout_.layers(); ++l) {
        for (const auto& piece : map_.homes.of(content, LayerId{l})) {
          if (piece.tier != Tier::nvme || !piece.extent.overlaps(extent)) continue;
          return name(content, LayerId{l},
                      piece.data_offset + (extent.offset - piece.extent.offset), extent.size);
        }
        if (content == Content::parameter || map_.durable.count == 0) continue;
        const auto block = durable_extent(map_, content, LayerId{l}, {},
                                          layout_.block_size(LayerId{l}, content));
        if (!block.overlaps(extent)) continue;
        return name(content, LayerId{l}, extent.offset - block.offset, extent.size);
      }
    }
    return "saved inputs at addresses [" + std::to_string(extent.offset.count) + ", " +
           std::to_string(extent.end().count) + ")";
  }

 private:
  std::string name(Content content, LayerId layer, Bytes offset, Bytes size) const {
    const auto element = layout_.element_size(content).count;
    const std::uint64_t first = offset.count / element;
    const std::uint64_t end = first + size.count / element;
    std::string tensors;
    const auto& block = layout_.block(layer);
    const auto& specs = layout_.layer(layer).tensors;
    for (std::size_t t = 0; t < specs.size(); ++t) {
      if (block.tensors[t].first >= end || block.tensors[t].end() <= first) continue;
      tensors += (tensors.empty() ? "" : ", ") + specs[t].name;
    }
    return std::string(to_string(content)) + " of layer '" + layout_.layer(layer).name +
           "', elements [" + std::to_string(first) + ", " + std::to_string(end) +
           ") of its block (tensors " + (tensors.empty() ? "none" : tensors) + ")";
  }

  const ModelLayout& layout_;
  const MemoryMap& map_;
};

}  // namespace

void check_config(const Config& config) {
  if (config.nvme.empty() && config.budget.nvme.value_or(Bytes{}).count > 0) {
    throw Error(ErrorCode::invalid_argument,
                "an nvme budget is given and no nvme directory; name one");
  }
  if (config.store.slots < 1 || config.store.slots > 2 || config.store.commit_interval == 0) {
    throw Error(ErrorCode::invalid_argument,
                "a store has 1 or 2 slots and commits every step or less often: " +
                    std::to_string(config.store.slots) + " slots, commit interval " +
                    std::to_string(config.store.commit_interval));
  }
  if (config.micro_batches == 0) {
    throw Error(ErrorCode::invalid_argument, "a step has at least one micro-batch");
  }
  const bool durable = !config.nvme.empty() && config.store.slots == 2;
  if (config.store.mode == StoreMode::resume && !durable) {
    throw Error(ErrorCode::invalid_argument,
                config.nvme.empty() ? "to resume, name the nvme directory of the store"
                                    : "one slot keeps nothing to resume; two slots do");
  }
  if (config.store.mode == StoreMode::discard && config.nvme.empty()) {
    throw Error(ErrorCode::invalid_argument, "to discard a store, name its nvme directory");
  }
}

Bytes free_on_drives(const std::vector<NvmeConfig>& drives,
                     const std::vector<std::uint32_t>& weights, StoreMode mode) {
  if (drives.empty()) return {};
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  double least = 0x1p62;
  Bytes continued;
  for (std::size_t d = 0; d < drives.size(); ++d) {
    Bytes free = free_in(drives[d]);
    const Bytes taken = taken_in(drives[d].path);
    if (mode == StoreMode::resume) continued += taken;
    else free += taken;
    least = std::min(least, static_cast<double>(free.count) * sum / weights[d]);
  }
  return continued + Bytes{static_cast<std::uint64_t>(least)};
}

std::string free_text(const std::vector<NvmeConfig>& drives) {
  std::string text;
  for (const auto& drive : drives) {
    auto whole = drive;
    whole.keep_free = {};
    text += "\nFree in " + drive.path + ": " + to_string(free_in(whole));
    if (drive.keep_free.count > 0) text += ", " + to_string(drive.keep_free) + " of it to be kept";
    text += ".";
  }
  return text;
}

DurabilityInput durability_of(const Config& config, const std::vector<DriveSpeed>& drives) {
  DurabilityInput durability;
  durability.two_slots = !config.nvme.empty() && config.store.slots == 2;
  durability.commit_interval = config.store.commit_interval;
  durability.keeps_bytes = config.loss_scale.enabled;
  if (!drives.empty()) durability.weights = stripe_weights(stripe_speeds(drives));
  return durability;
}

StoreOptions store_options(const Config& config, const ModelLayout& layout, const MemoryMap& map,
                           const std::vector<DriveSpeed>& drives) {
  StoreOptions options;
  const auto speeds = stripe_speeds(drives);
  for (std::size_t d = 0; d < config.nvme.size(); ++d) {
    options.drives.push_back({config.nvme[d].path, speeds[d], config.nvme[d].keep_free});
  }
  if (map.durable.count > 0) options.durable = durable_regions(layout);
  options.scratch = scratch_regions(layout, map);
  options.transient = at(map.resident, Tier::nvme);
  options.identity = identity_of(config, layout.model());
  options.mode = config.store.mode;
  options.checksums = config.store.checksums;
  options.patience = from_seconds(config.store.timeout_seconds);
  options.describe = Describer(layout, map);
  return options;
}

}  // namespace terrace
