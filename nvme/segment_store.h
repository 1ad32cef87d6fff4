// The plan's NVMe addresses on real drives: slots, checksums, striping, commits.
//
// Asynchronous, like the I/O engine below it: requests are taken, and completed by reap(). Every
// byte of a request is accounted for, or the request fails with a sentence that says what, where
// and what to do. A write that fails is tried again elsewhere before it counts as failed.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "nvme/checksum.h"
#include "nvme/page_buffer.h"
#include "nvme/segment_table.h"
#include "nvme/store_files.h"
#include "terrace/engine.h"
#include "terrace/error.h"
#include "terrace/io_engine.h"

namespace terrace {

struct StoreRequest {
  Ticket ticket;
  IoOperation operation = IoOperation::read;  // or write
  Extent extent;                              // whole segments, or inside the transient part
  std::byte* memory = nullptr;
};

struct StoreResult {
  Completion completion;
  std::string error;  // the sentence, when completion.error is not 0
};

// Thread rule: the I/O engine's owner makes all calls.
class SegmentStore {
 public:
  // Opens the files; see open_store().
  SegmentStore(IoEngine& io, StoreOptions options);
  ~SegmentStore();  // closes them; nothing may be in flight

  // The commit that this store continues; empty: it is new, every address is undefined.
  const std::optional<CommitRecord>& resumed() const { return opened_.resumed; }
  const std::vector<std::string>& notes() const { return opened_.notes; }

  // Returns which of its operations that is.
  std::size_t submit(const StoreRequest& request);

  // What the next write of `extent` will contain: hashes of its tiles, and the step that makes it.
  // Required before every write, with no hashes when checksums are off.
  void stage(Extent extent, std::uint64_t generation, std::span<const std::uint64_t> tiles);
  // "" when tiles that hash like this are what was last written to `extent`; else the sentence.
  std::string mismatch(Extent extent, std::span<const std::uint64_t> tiles) const;
  bool checksums() const { return options_.checksums; }
  // The unit of hashing at an address; tiles begin anew at each segment, and at each extent in the
  // transient part.
  Bytes tile(Bytes address) const;
  std::size_t tiles(Extent extent) const;  // their number

  // Makes everything written so far current, durably, on all drives. All writes must have
  // completed, and none may be submitted before this has.
  std::size_t commit(Ticket ticket, std::uint64_t step, std::string trainer);

  void flush();
  std::size_t pending() const { return open_operations_ + results_.size(); }
  // As IoEngine::reap().
  std::size_t reap(std::vector<StoreResult>& results, Nanoseconds timeout);
  // An operation that makes no progress; sticky. Its memory belongs to the kernel for ever.
  const std::optional<Error>& stuck() const { return stuck_; }
  // A commit that failed; sticky. Which of the last two steps counts is for the next resume to
  // find out, and both slots are needed for that: nothing may be written any more.
  const std::optional<Error>& broken() const { return broken_; }

  // Blocking, while nothing is in flight: throw Error(io or corrupt).
  void read_now(Extent extent, std::span<std::byte> memory);
  void write_now(Extent extent, std::span<std::byte> memory, std::uint64_t generation);
  void commit_now(std::uint64_t step, std::string trainer);
  // The durable part is what the last commit holds; before the first one it is undefined.
  void revert();

  std::vector<DriveStats> stats() const;
  std::uint64_t quarantined() const { return durable_.quarantined() + scratch_.quarantined(); }

 private:
  enum class Purpose : std::uint8_t { data, table, table_flush, record, record_flush };

  // What a caller waits for.
  struct Operation {
    Ticket ticket;
    IoOperation kind = IoOperation::read;
    Extent extent;
    std::uint32_t pieces = 0;  // open
    int error = 0;
    std::string message;
    bool abandoned = false;    // the caller has gone
    Nanoseconds start = Nanoseconds::max();
    Nanoseconds end{0};
  };

  // One request to the I/O engine: consecutive bytes of one file, of one or more whole segments.
  struct Piece {
    std::size_t operation = 0;
    Purpose purpose = Purpose::data;
    IoRequest request;
    Extent extent;       // data: its addresses
    std::uint32_t drive = 0;
    int attempts = 0;
  };

  struct Drive {
    FileId scratch;
    bool has_scratch = false;
    Nanoseconds progress{0};      // when it last completed something, or began to have to
    std::size_t in_flight = 0;
    std::deque<std::size_t> waiting;  // pieces that the engine has not taken yet
    Bytes read;
    Bytes written;
  };

  struct Commit {
    std::size_t operation = 0;
    std::uint64_t step = 0;
    std::string trainer;
    Purpose stage = Purpose::table;
    std::vector<std::uint64_t> table_checksums;
  };

  bool durable(Bytes address) const { return address < geometry_end_; }
  const StoreGeometry& geometry(Bytes address) const;
  SegmentTable& table(Bytes address) { return durable(address) ? durable_ : scratch_; }
  const SegmentTable& table(Bytes address) const { return durable(address) ? durable_ : scratch_; }
  FileId file(Bytes address, std::uint32_t drive) const;
  void open_scratch();

  std::size_t open_operation(Ticket ticket, IoOperation kind, Extent extent);
  void add_piece(Piece piece);
  void add_data_pieces(std::size_t operation, const StoreRequest& request);
  void pump();
  void complete(const Completion& completion);
  void piece_done(const Piece& piece);
  bool retry(Piece piece, int error);
  bool move_to_spare(Piece piece, std::size_t segment, int error);
  void fail(const Piece& piece, int error);
  void close_operation(std::size_t index);
  void watch();
  StoreResult run_now(std::size_t operation);

  // ---- commits
  void begin_stage();
  void add_metadata(std::uint32_t drive, IoOperation kind, Bytes offset,
                    std::span<std::byte> memory);
  void write_tables();
  void write_trainer(std::uint32_t drive);
  void write_records();
  void next_stage();

  SegmentClaim claim(std::size_t segment, Bytes address, Bytes size,
                     std::uint64_t generation) const;
  template <class Visit>
  void for_each_segment(Extent extent, std::span<const std::uint64_t> tiles, Visit&& visit) const;
  std::vector<std::uint64_t> hash(Extent extent, std::span<const std::byte> memory) const;
  std::string where(Extent extent) const;

  IoEngine& io_;
  const StoreOptions options_;
  OpenedStore opened_;
  StoreGeometry scratch_geometry_;
  Bytes geometry_end_;  // of the durable part
  SegmentTable durable_;
  SegmentTable scratch_;
  std::vector<Drive> drives_;

  struct TransientSum {
    Bytes size;
    std::uint64_t checksum = 0;
    std::uint64_t generation = 0;
  };
  std::map<Bytes, TransientSum> transient_;  // by first address

  std::vector<Operation> operations_;
  std::vector<std::size_t> free_operations_;
  std::size_t open_operations_ = 0;
  std::vector<Piece> pieces_;
  std::vector<std::size_t> free_pieces_;
  std::vector<StoreResult> results_;
  std::vector<Completion> completions_;
  std::optional<Commit> commit_;
  std::vector<PageBuffer> table_buffers_;   // by drive
  std::vector<PageBuffer> record_buffers_;
  std::optional<Error> stuck_;
  std::optional<Error> broken_;
};

}  // namespace terrace
