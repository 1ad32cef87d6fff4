// Requests, cut into transfers, and what becomes of each: the accounting that every engine shares.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "terrace/io_engine.h"

namespace terrace {

// One system call's worth of a request.
struct Transfer {
  IoOperation operation = IoOperation::read;
  FileId file;
  std::uint64_t offset = 0;  // of what is left to do
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;   // left to do
  std::uint32_t request = 0; // index into the table's requests
  int attempts = 0;          // in a row without progress
};

// Thread rule: the engine's owner.
class TransferTable {
 public:
  static constexpr std::size_t kMaxRequests = 64;  // accepted and not completed
  static constexpr int kMaxAttempts = 1000;        // EINTR, EAGAIN without progress

  // At most `slots` transfers are in flight, none larger than `block`.
  TransferTable(std::uint32_t slots, Bytes block);

  // False when kMaxRequests are open. A request that breaks `alignment` completes with EINVAL.
  bool submit(const IoRequest& request, std::uint32_t alignment);

  // The slot of the next transfer to start, or -1 when there is none or no slot is free.
  int next(Nanoseconds now);
  const Transfer& at(int slot) const { return slots_[static_cast<std::size_t>(slot)]; }

  // The result of the slot's system call: bytes, or -errno. True: what is left must be started
  // again. Short transfers go on where they stopped, at a multiple of `alignment` at the latest.
  bool advance(int slot, std::int64_t result, std::uint32_t alignment, Nanoseconds now);

  std::size_t collect(std::vector<Completion>& completions);
  bool has_completed() const { return !completed_.empty(); }
  std::size_t pending() const { return open_ + completed_.size(); }
  std::size_t in_flight() const { return slots_.size() - free_slots_.size(); }

 private:
  struct Request {
    IoRequest what;
    std::uint64_t cut = 0;     // bytes handed to transfers so far
    std::uint32_t flying = 0;  // its transfers in flight
    int error = 0;             // the first one
    bool started = false;
    Nanoseconds start{0};
  };

  bool fully_cut(const Request& request) const;
  void end_transfer(int slot, int error, Nanoseconds now);

  const std::uint64_t block_;
  std::vector<Transfer> slots_;
  std::vector<int> free_slots_;
  std::vector<Request> requests_;
  std::vector<std::uint32_t> free_requests_;
  std::deque<std::uint32_t> uncut_;  // requests with bytes that no transfer has yet, in order
  std::size_t open_ = 0;
  std::vector<Completion> completed_;
};

}  // namespace terrace
