// Requests, cut into transfers, and what becomes of each: the accounting that every engine shares.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "terrace/io_engine.h"

namespace terrace {

inline constexpr std::size_t kMaxRequests = 1024;     // taken and not yet given back
inline constexpr std::uint32_t kMaxTransfers = 1024;  // in flight, whatever queue_depth says
inline constexpr Bytes kMaxBlock = 1_GiB;             // a system call moves less than 2 GiB
inline constexpr int kMaxInterruptions = 1000;        // EINTR or EAGAIN in a row, without progress
inline constexpr int kMaxStalls = 8;                  // short results in a row, without progress

// The error that a request deserves before it is tried: EINVAL (not aligned as `file` wants it),
// ENODATA (reads past the end), ENOSPC (writes past what open() reserved); 0: none.
int refusal(const IoRequest& request, const IoFileInfo& file);

// One system call's worth of a request.
struct Transfer {
  IoOperation operation = IoOperation::read;
  FileId file;
  std::uint64_t offset = 0;  // of what is left to do
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;   // left to do
  std::uint32_t request = 0; // index into the table's requests
  int interruptions = 0;     // in a row
  int stalls = 0;            // in a row
};

// Thread rule: the engine's owner.
class TransferTable {
 public:
  // At most `depth` transfers (1 to kMaxTransfers) are in flight, none larger than `block`.
  TransferTable(std::uint32_t depth, Bytes block);

  // False when kMaxRequests are pending. A request that is refused, or has nothing to move,
  // completes at once.
  bool submit(const IoRequest& request, const IoFileInfo& file);

  // The slot of the next transfer to start, or -1 when there is none or no slot is free.
  int next(Nanoseconds now);
  const Transfer& at(int slot) const { return slots_[static_cast<std::size_t>(slot)]; }

  // The result of the slot's system call: bytes, or -errno. True: what is left must be started
  // again. Short transfers go on where they stopped, or at the last aligned offset before it. The
  // first error of a request is the one that it completes with, after its last transfer.
  bool advance(int slot, std::int64_t result, Nanoseconds now);

  // Appends what has completed, in order of completion.
  std::size_t collect(std::vector<Completion>& completions);
  bool has_completed() const { return !completed_.empty(); }
  std::size_t pending() const { return open_ + completed_.size(); }
  // Whether a request on `file` has not completed.
  bool uses(FileId file) const;
  // The most transfers in flight.
  std::uint32_t depth() const { return static_cast<std::uint32_t>(slots_.size()); }

 private:
  struct Request {
    IoRequest what;
    std::uint32_t alignment = 0;
    std::uint64_t cut = 0;     // bytes handed to transfers so far
    std::uint32_t flying = 0;  // its transfers in flight
    int error = 0;             // the first one
    bool open = false;         // taken and not completed
    bool started = false;
    Nanoseconds start{0};
  };

  static bool fully_cut(const Request& request);
  bool advance_short(int slot, std::uint64_t moved, Nanoseconds now);
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
