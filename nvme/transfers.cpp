#include "nvme/transfers.h"

#include <algorithm>
#include <cerrno>

#include "terrace/error.h"

namespace terrace {

int refusal(const IoRequest& request, const IoFileInfo& file) {
  if (request.operation == IoOperation::flush) return 0;
  const auto address = reinterpret_cast<std::uintptr_t>(request.data);
  if (request.offset % file.alignment != 0 || request.bytes % file.alignment != 0 ||
      address % file.alignment != 0) {
    return EINVAL;
  }
  const auto size = file.size.count;
  if (request.bytes <= size && request.offset <= size - request.bytes) return 0;
  return request.operation == IoOperation::read ? ENODATA : ENOSPC;
}

TransferTable::TransferTable(std::uint32_t depth, Bytes block, std::uint32_t drives)
    : block_(std::clamp(block, 1_B, kMaxBlock).count), drives_(std::clamp(drives, 1U, kMaxDrives)) {
  const auto count = static_cast<std::uint32_t>(drives_.size());
  slots_.resize(std::size_t{count} * std::clamp(depth, 1U, kMaxTransfers / count));
  for (auto slot = slots_.size(); slot-- > 0;) {
    drives_[slot % count].free_slots.push_back(static_cast<int>(slot));
  }
  requests_.resize(count * kMaxRequests);
  for (auto i = static_cast<std::uint32_t>(requests_.size()); i-- > 0;) free_requests_.push_back(i);
}

bool TransferTable::submit(const IoRequest& request, const IoFileInfo& file) {
  TERRACE_CHECK(file.drive < drives_.size());
  auto& drive = drives_[file.drive];
  if (drive.open + drive.completed >= kMaxRequests) return false;
  const int error = refusal(request, file);
  if (error != 0 || (request.operation != IoOperation::flush && request.bytes == 0)) {
    const auto now = steady_clock().now();
    completed_.push_back({request.ticket, error, 0, now, now});
    ++drive.completed;
    return true;
  }
  const auto index = free_requests_.back();
  free_requests_.pop_back();
  auto& taken = requests_[index] = {};
  taken.what = request;
  taken.drive = file.drive;
  taken.alignment = file.alignment;
  taken.direct = file.direct && request.operation != IoOperation::flush;
  taken.open = true;
  drive.uncut.push_back(index);
  ++drive.open;
  ++open_;
  return true;
}

bool TransferTable::fully_cut(const Request& request) {
  return request.what.operation == IoOperation::flush ? request.started
                                                      : request.cut == request.what.bytes;
}

int TransferTable::next(Nanoseconds now) {
  for (std::size_t i = 0; i < drives_.size(); ++i) {
    auto& drive = drives_[turn_];
    turn_ = (turn_ + 1) % drives_.size();
    if (!drive.uncut.empty() && !drive.free_slots.empty()) return cut(drive, now);
  }
  return -1;
}

int TransferTable::cut(Drive& drive, Nanoseconds now) {
  const auto index = drive.uncut.front();
  auto& request = requests_[index];
  const int slot = drive.free_slots.back();
  drive.free_slots.pop_back();
  auto& transfer = slots_[static_cast<std::size_t>(slot)] = {};
  transfer.operation = request.what.operation;
  transfer.file = request.what.file;
  transfer.request = index;
  transfer.direct = request.direct;
  if (transfer.operation != IoOperation::flush) {
    transfer.offset = request.what.offset + request.cut;
    transfer.data = request.what.data + request.cut;
    transfer.bytes = std::min(round_up(block_, request.alignment),
                              request.what.bytes - request.cut);
    request.cut += transfer.bytes;
  }
  if (!request.started) request.start = now;
  request.started = true;
  ++request.flying;
  if (fully_cut(request)) drive.uncut.pop_front();
  return slot;
}

bool TransferTable::advance(int slot, std::int64_t result, Nanoseconds now) {
  auto& transfer = slots_[static_cast<std::size_t>(slot)];
  if ((result == -EINTR || result == -EAGAIN) && ++transfer.interruptions < kMaxInterruptions) {
    return true;
  }
  if (result < 0 || transfer.operation == IoOperation::flush) {
    end_transfer(slot, result < 0 ? static_cast<int>(-result) : 0, now);
    return false;
  }
  const auto moved = static_cast<std::uint64_t>(result);
  TERRACE_CHECK(moved <= transfer.bytes);
  if (moved < transfer.bytes) return advance_short(slot, moved, now);
  end_transfer(slot, 0, now);
  return false;
}

// Direct I/O must go on at an aligned offset: the bytes after the last boundary are moved again.
bool TransferTable::advance_short(int slot, std::uint64_t moved, Nanoseconds now) {
  auto& transfer = slots_[static_cast<std::size_t>(slot)];
  const std::uint64_t alignment = requests_[transfer.request].alignment;
  const std::uint64_t kept = moved / alignment * alignment;
  transfer.interruptions = 0;
  transfer.stalls = kept > 0 ? 0 : transfer.stalls + 1;
  if (moved == 0 || transfer.stalls == kMaxStalls) {
    end_transfer(slot, transfer.operation == IoOperation::read ? ENODATA : EIO, now);
    return false;
  }
  transfer.offset += kept;
  transfer.data += kept;
  transfer.bytes -= kept;
  return true;
}

void TransferTable::end_transfer(int slot, int error, Nanoseconds now) {
  const auto index = at(slot).request;
  auto& request = requests_[index];
  auto& drive = drives_[request.drive];
  drive.free_slots.push_back(slot);
  --request.flying;
  if (error != 0 && request.error == 0) {
    request.error = error;
    if (!fully_cut(request)) {  // the rest is not tried
      request.cut = request.what.bytes;
      drive.uncut.erase(std::find(drive.uncut.begin(), drive.uncut.end(), index));
    }
  }
  if (request.flying > 0 || !fully_cut(request)) return;
  const bool moved = request.error == 0 && request.what.operation != IoOperation::flush;
  completed_.push_back({request.what.ticket, request.error, moved ? request.what.bytes : 0,
                        request.start, now});
  request.open = false;
  free_requests_.push_back(index);
  --drive.open;
  ++drive.completed;
  --open_;
}

std::size_t TransferTable::collect(std::vector<Completion>& completions) {
  const auto count = completed_.size();
  completions.insert(completions.end(), completed_.begin(), completed_.end());
  completed_.clear();
  for (auto& drive : drives_) drive.completed = 0;
  return count;
}

bool TransferTable::uses(FileId file) const {
  return std::any_of(requests_.begin(), requests_.end(), [&](const Request& request) {
    return request.open && request.what.file == file;
  });
}

}  // namespace terrace
