#include "nvme/transfers.h"

#include <algorithm>
#include <cerrno>

#include "terrace/error.h"

namespace terrace {

TransferTable::TransferTable(std::uint32_t slots, Bytes block)
    : block_(std::max<std::uint64_t>(round_up(block.count, 4096), 4096)),
      slots_(std::max(1U, slots)),
      requests_(kMaxRequests) {
  for (auto slot = static_cast<int>(slots_.size()); slot-- > 0;) free_slots_.push_back(slot);
  for (auto i = static_cast<std::uint32_t>(kMaxRequests); i-- > 0;) free_requests_.push_back(i);
}

bool TransferTable::submit(const IoRequest& request, std::uint32_t alignment) {
  if (free_requests_.empty()) return false;
  const auto address = reinterpret_cast<std::uintptr_t>(request.data);
  if (request.operation != IoOperation::flush &&
      (request.offset % alignment != 0 || request.bytes % alignment != 0 ||
       address % alignment != 0)) {
    completed_.push_back({request.ticket, EINVAL, 0, {}, {}});
    return true;
  }
  if (request.operation != IoOperation::flush && request.bytes == 0) {
    completed_.push_back({request.ticket, 0, 0, {}, {}});
    return true;
  }
  const auto index = free_requests_.back();
  free_requests_.pop_back();
  requests_[index] = {request, 0, 0, 0, false, {}};
  uncut_.push_back(index);
  ++open_;
  return true;
}

bool TransferTable::fully_cut(const Request& request) const {
  return request.what.operation == IoOperation::flush ? request.started
                                                      : request.cut == request.what.bytes;
}

int TransferTable::next(Nanoseconds now) {
  if (uncut_.empty() || free_slots_.empty()) return -1;
  const auto index = uncut_.front();
  auto& request = requests_[index];
  const int slot = free_slots_.back();
  free_slots_.pop_back();
  const auto& what = request.what;
  const bool flush = what.operation == IoOperation::flush;
  const std::uint64_t size = flush ? 0 : std::min(block_, what.bytes - request.cut);
  slots_[static_cast<std::size_t>(slot)] = {what.operation,
                                            what.file,
                                            what.offset + request.cut,
                                            flush ? nullptr : what.data + request.cut,
                                            size,
                                            index,
                                            0};
  if (!request.started) request.start = now;
  request.started = true;
  request.cut += size;
  ++request.flying;
  if (fully_cut(request)) uncut_.pop_front();
  return slot;
}

bool TransferTable::advance(int slot, std::int64_t result, std::uint32_t alignment,
                            Nanoseconds now) {
  auto& transfer = slots_[static_cast<std::size_t>(slot)];
  if (result == -EINTR || result == -EAGAIN) {
    if (++transfer.attempts < kMaxAttempts) return true;
    end_transfer(slot, static_cast<int>(-result), now);
    return false;
  }
  if (result < 0 || transfer.operation == IoOperation::flush) {
    end_transfer(slot, static_cast<int>(-result), now);
    return false;
  }
  const auto moved = static_cast<std::uint64_t>(result);
  TERRACE_CHECK(moved <= transfer.bytes);
  if (moved == transfer.bytes) {
    end_transfer(slot, 0, now);
    return false;
  }
  // Direct I/O must go on at an aligned offset: the bytes after the last boundary are moved again.
  const std::uint64_t kept = moved / alignment * alignment;
  if (moved == 0 || (kept == 0 && ++transfer.attempts >= kMaxAttempts)) {
    end_transfer(slot, transfer.operation == IoOperation::read ? ENODATA : EIO, now);
    return false;
  }
  if (kept > 0) transfer.attempts = 0;
  transfer.offset += kept;
  transfer.data += kept;
  transfer.bytes -= kept;
  return true;
}

void TransferTable::end_transfer(int slot, int error, Nanoseconds now) {
  const auto index = slots_[static_cast<std::size_t>(slot)].request;
  auto& request = requests_[index];
  free_slots_.push_back(slot);
  --request.flying;
  if (error != 0 && request.error == 0) {
    request.error = error;
    if (!fully_cut(request)) {  // the rest is not tried
      request.cut = request.what.bytes;
      uncut_.erase(std::find(uncut_.begin(), uncut_.end(), index));
    }
  }
  if (request.flying > 0 || !fully_cut(request)) return;
  const bool moved = request.error == 0 && request.what.operation != IoOperation::flush;
  completed_.push_back({request.what.ticket, request.error, moved ? request.what.bytes : 0,
                        request.start, now});
  free_requests_.push_back(index);
  --open_;
}

std::size_t TransferTable::collect(std::vector<Completion>& completions) {
  const auto count = completed_.size();
  completions.insert(completions.end(), completed_.begin(), completed_.end());
  completed_.clear();
  return count;
}

}  // namespace terrace
