#include "nvme/simulated_disk.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <deque>
#include <exception>
#include <numeric>

#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::uint64_t kSector = 512;
constexpr Bytes kGrain = 4_KiB;                // of file sizes
constexpr Bytes kLargestFile = 1_TiB * 1024;   // far more than there can be
constexpr std::uint64_t kMaxCached = 64 << 20;  // bytes per file; beyond, the oldest become durable

struct CachedWrite {
  std::uint64_t number = 0;
  std::uint64_t offset = 0;
  std::vector<std::byte> data;

  void apply_to(std::vector<std::byte>& content) const {
    std::memcpy(content.data() + offset, data.data(), data.size());
  }
};

// What a power cut leaves of the writes in a cache.
class Aftermath {
 public:
  Aftermath(std::vector<std::byte>& content, std::mt19937_64& random)
      : content_(content), random_(random), hit_(content.size() / kSector) {}

  void settle(const std::deque<CachedWrite>& cache) {
    const auto outcome = random_() % 4;
    if (outcome == 0) return;
    if (outcome == 1) {
      for (const auto& write : cache) write.apply_to(content_);
      return;
    }
    std::vector<std::size_t> order(cache.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    for (auto i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_() % i]);
    for (const auto i : order) tear(cache[i]);
  }

 private:
  // Whole, not at all, or sector by sector; a sector that another write has reached goes to either.
  void tear(const CachedWrite& write) {
    const auto kept_of_8 = std::array<std::uint64_t, 5>{0, 1, 4, 7, 8}[random_() % 5];
    for (std::uint64_t done = 0; done < write.data.size(); done += kSector) {
      const auto sector = (write.offset + done) / kSector;
      if (random_() % 8 >= kept_of_8 || (hit_[sector] && random_() % 2 == 0)) continue;
      hit_[sector] = true;
      std::memcpy(content_.data() + write.offset + done, write.data.data() + done, kSector);
    }
  }

  std::vector<std::byte>& content_;
  std::mt19937_64& random_;
  std::vector<bool> hit_;
};

Error missing(const std::string& what, const std::string& path) {
  return {ErrorCode::io,
          what + " " + path + " in memory failed: there is no such file; check the path"};
}

Error too_large(const IoFileOptions& options) {
  return {ErrorCode::io, "making " + options.path + " in memory failed: " +
                             std::to_string(options.size.count) + " bytes (" +
                             to_string(options.size) +
                             ") are more than there is; lower the nvme budget or use an engine "
                             "with real files"};
}

}  // namespace

struct SimulatedDisk::File {
  bool cached = false;              // its writes go through the cache
  std::vector<std::byte> content;   // what reads see
  std::vector<std::byte> durable;   // what a power cut leaves at least; empty when not cached
  std::deque<CachedWrite> cache;    // oldest first
  std::uint64_t cached_bytes = 0;
  std::uint64_t next_number = 0;    // of a write

  void make_oldest_durable() {
    cache.front().apply_to(durable);
    cached_bytes -= cache.front().data.size();
    cache.pop_front();
  }
};

SimulatedDisk::SimulatedDisk(SimulatedDiskOptions options)
    : options_(options), random_(options.seed) {}
SimulatedDisk::~SimulatedDisk() = default;

void SimulatedDisk::cut_power_at(std::uint64_t operation) {
  const std::lock_guard lock(mutex_);
  cut_at_ = operation;
}

bool SimulatedDisk::has_power() const {
  const std::lock_guard lock(mutex_);
  return powered(epoch_);
}

std::uint64_t SimulatedDisk::operations() const {
  const std::lock_guard lock(mutex_);
  return operations_;
}

std::uint64_t SimulatedDisk::epoch() const {
  const std::lock_guard lock(mutex_);
  return epoch_;
}

void SimulatedDisk::restart(std::uint64_t seed) {
  const std::lock_guard lock(mutex_);
  random_.seed(seed);
  for (auto& [path, file] : names_) {
    auto after = std::make_shared<File>();
    after->cached = file->cached;
    after->content = file->cached ? file->durable : file->content;
    Aftermath(after->content, random_).settle(file->cache);
    if (file->cached) after->durable = after->content;
    file = std::move(after);  // engines of before keep the old one
  }
  ++epoch_;
  operations_ = 0;
  cut_at_ = 0;
}

std::shared_ptr<SimulatedDisk> SimulatedDisk::copy() const {
  auto other = std::make_shared<SimulatedDisk>(options_);
  const std::lock_guard lock(mutex_);
  for (const auto& [path, file] : names_) other->names_[path] = std::make_shared<File>(*file);
  return other;
}

// Every operation is counted; the one that the power cut was planned for does not happen.
bool SimulatedDisk::count(std::uint64_t epoch) {
  if (epoch != epoch_) return false;
  ++operations_;
  return powered(epoch);
}

bool SimulatedDisk::powered(std::uint64_t epoch) const {
  return epoch == epoch_ && (cut_at_ == 0 || operations_ < cut_at_);
}

void SimulatedDisk::refuse_without_power(const std::string& what, std::uint64_t epoch) const {
  if (powered(epoch)) return;
  throw Error(ErrorCode::io, what + " failed: " + std::strerror(EIO) +
                                 "; the simulated disk has lost its power; restart it");
}

std::shared_ptr<SimulatedDisk::File> SimulatedDisk::open(const IoFileOptions& options,
                                                         std::uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  count(epoch);
  refuse_without_power("opening " + options.path, epoch);
  if (options.mode == IoFileMode::existing) return find(options.path);
  if (options.mode == IoFileMode::create && names_.contains(options.path)) {
    throw Error(ErrorCode::io, "creating " + options.path +
                                   " in memory failed: it exists; choose another name");
  }
  auto file = make(options);
  if (options.mode == IoFileMode::create) names_[options.path] = file;
  return file;
}

bool SimulatedDisk::exists(const std::string& path, std::uint64_t epoch) const {
  const std::lock_guard lock(mutex_);
  refuse_without_power("looking for " + path, epoch);
  return names_.contains(path);
}

void SimulatedDisk::remove(const std::string& path, std::uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  count(epoch);
  refuse_without_power("removing " + path, epoch);
  if (names_.erase(path) == 0) throw missing("removing", path);
}

std::shared_ptr<SimulatedDisk::File> SimulatedDisk::find(const std::string& path) const {
  const auto found = names_.find(path);
  if (found == names_.end()) throw missing("opening", path);
  return found->second;
}

std::shared_ptr<SimulatedDisk::File> SimulatedDisk::make(const IoFileOptions& options) const {
  if (options.size > kLargestFile) throw too_large(options);
  auto file = std::make_shared<File>();
  file->cached = options_.write_cache && options.mode == IoFileMode::create;
  try {
    file->content.resize(round_up(options.size, kGrain).count);
    if (file->cached) file->durable.resize(file->content.size());
  } catch (const std::exception&) {  // bad_alloc, length_error
    throw too_large(options);
  }
  return file;
}

Bytes SimulatedDisk::size_of(const File& file) { return {file.content.size()}; }

SimulatedDisk::Admission SimulatedDisk::admit(const File& file, std::uint64_t epoch) {
  const std::lock_guard lock(mutex_);
  const bool has_power = count(epoch);
  return {epoch, has_power, file.next_number};
}

int SimulatedDisk::serve(const IoRequest& request, File& file, const Admission& admission) {
  const std::lock_guard lock(mutex_);
  if (!admission.powered) return EIO;
  const bool on = powered(admission.epoch);
  switch (request.operation) {
    case IoOperation::read:
      if (on) std::memcpy(request.data, file.content.data() + request.offset, request.bytes);
      break;
    case IoOperation::write:
      write(request, file);  // without power: in flight when it went, so any part may survive
      break;
    case IoOperation::flush:
      while (on && !file.cache.empty() && file.cache.front().number < admission.covered) {
        file.make_oldest_durable();
      }
      break;
  }
  return on ? 0 : EIO;
}

void SimulatedDisk::write(const IoRequest& request, File& file) {
  if (request.bytes == 0) return;
  std::memcpy(file.content.data() + request.offset, request.data, request.bytes);
  if (!file.cached) return;
  file.cache.push_back(
      {file.next_number++, request.offset, {request.data, request.data + request.bytes}});
  file.cached_bytes += request.bytes;
  while (file.cached_bytes > kMaxCached) file.make_oldest_durable();
}

std::size_t SimulatedDisk::batch(std::size_t waiting) {
  const std::lock_guard lock(mutex_);
  return options_.shuffled && waiting > 0 ? 1 + random_() % waiting : waiting;
}

std::size_t SimulatedDisk::pick(std::size_t waiting) {
  const std::lock_guard lock(mutex_);
  return options_.shuffled ? random_() % waiting : 0;
}

}  // namespace terrace
