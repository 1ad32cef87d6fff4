// Requests, cut into transfers, and what becomes of each: the accounting that every engine shares.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "terrace/io_engine.h"

namespace terrace {

inline constexpr std::size_t kMaxRequests = 1024;     // taken and not yet given back, per drive
inline constexpr std::uint32_t kMaxTransfers = 1024;  // in flight, whatever queue_depth says
inline constexpr std::uint32_t kMaxDrives = kMaxIoFiles;
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
  bool direct = false;       // the file was when the request was taken
  int interruptions = 0;     // in a row
  int stalls = 0;            // in a row
};

// A queue for each drive; the drives are served in turn, so that none waits for a slower one.
// Thread rule: the engine's owner.
class TransferTable {
 public:
  // At most `depth` transfers are in flight for each of `drives` (1 to kMaxDrives), kMaxTransfers
  // in all; none is larger than `block`.
  TransferTable(std::uint32_t depth, Bytes block, std::uint32_t drives = 1);

  // False when kMaxRequests of the file's drive are pending. A request that is refused, or has
  // nothing to move, completes at once.
  bool submit(const IoRequest& request, const IoFileInfo& file);

  // The slot of the next transfer to start, or -1 when no drive has both one and a free slot.
  int next(Nanoseconds now);
  const Transfer& at(int slot) const { return slots_[static_cast<std::size_t>(slot)]; }

  // The result of the slot's system call: bytes, or -errno. True: what is left must be started
  // again. Short transfers go on where they stopped, or at the last aligned offset before it. The
  // first error of a request is the one that it completes with, after its last transfer.
  bool advance(int slot, std::int64_t result, Nanoseconds now);

  // Whether the slot's transfer may have been refused for being direct. Once true, false from then
  // on.
  bool may_blame_direct(int slot) {
    return std::exchange(slots_[static_cast<std::size_t>(slot)].direct, false);
  }

  // Appends what has completed, in order of completion.
  std::size_t collect(std::vector<Completion>& completions);
  bool has_completed() const { return !completed_.empty(); }
  std::size_t pending() const { return open_ + completed_.size(); }
  // Whether a request on `file` has not completed.
  bool uses(FileId file) const;
  // The most transfers in flight: for one drive, and in all.
  std::uint32_t depth() const { return capacity() / drives(); }
  std::uint32_t capacity() const { return static_cast<std::uint32_t>(slots_.size()); }
  std::uint32_t drives() const { return static_cast<std::uint32_t>(drives_.size()); }

 private:
  struct Request {
    IoRequest what;
    std::uint32_t drive = 0;
    std::uint32_t alignment = 0;
    bool direct = false;
    std::uint64_t cut = 0;     // bytes handed to transfers so far
    std::uint32_t flying = 0;  // its transfers in flight
    int error = 0;             // the first one
    bool open = false;         // taken and not completed
    bool started = false;
    Nanoseconds start{0};
  };

  struct Drive {
    std::vector<int> free_slots;
    std::deque<std::uint32_t> uncut;  // requests with bytes that no transfer has yet, in order
    std::size_t open = 0;             // requests taken and not completed
    std::size_t completed = 0;        // and not yet collected
  };

  static bool fully_cut(const Request& request);
  int cut(Drive& drive, Nanoseconds now);
  bool advance_short(int slot, std::uint64_t moved, Nanoseconds now);
  void end_transfer(int slot, int error, Nanoseconds now);

  const std::uint64_t block_;
  std::vector<Transfer> slots_;
  std::vector<Drive> drives_;
  std::size_t turn_ = 0;  // the drive that is looked at first
  std::vector<Request> requests_;
  std::vector<std::uint32_t> free_requests_;
  std::size_t open_ = 0;
  std::vector<Completion> completed_;
};

}  // namespace terrace
