// What a store's files say about themselves, read without changing them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "nvme/page_buffer.h"
#include "nvme/store_format.h"
#include "nvme/store_geometry.h"
#include "terrace/io_engine.h"

namespace terrace {

inline constexpr Nanoseconds kPatience = std::chrono::seconds(60);

// What to do about a transfer that failed with this errno value.
const char* transfer_remedy(int error);
std::string seconds_text(Nanoseconds time);  // "60 s"

// Blocking calls on whole pages of any memory, while nothing else is in flight; each throws
// Error(io) that names path, offset and bytes. When an operation has not ended after `patience`,
// it throws too, and the operation goes on: the engine has it pending for ever, so that neither the
// engine nor the file may be closed.
class BlockingIo {
 public:
  explicit BlockingIo(IoEngine& io, Nanoseconds patience = kPatience)
      : io_(io), patience_(patience) {}
  void read(FileId file, Bytes offset, std::span<std::byte> memory);
  void write(FileId file, Bytes offset, std::span<const std::byte> memory);
  void flush(FileId file);

 private:
  void run(IoOperation operation, FileId file, Bytes offset, PageBuffer& buffer);
  IoEngine& io_;
  const Nanoseconds patience_;
};

// What a file says about itself, read without changing it.
struct InspectedStore {
  Bytes file_size;
  DecodedHeader header[2];
  DecodedSuperblock superblock[2];
  DecodedRecord record[2];
  std::vector<TableEntry> table[2];  // that of record i
  std::string table_problem[2];      // "": the table and the trainer's bytes are sound
  StoreFileLayout layout;            // void without a superblock
  bool unfinished = false;           // its creation was cut short: it never held anything
  bool cut_short = false;            // what it lacks is more than spares; no record was read
  std::uint64_t lost_spares = 0;     // it is shorter than it was; layout has the others

  const Superblock* sound() const;
  bool committed(std::size_t i) const { return record[i].record && table_problem[i].empty(); }
  bool any_commit() const { return committed(0) || committed(1); }
  // The next commit has begun to overwrite what an older record speaks of.
  bool given_up(std::size_t i) const;
  // Nothing was ever committed here, or nothing but the very first commit.
  bool at_first_commit() const;
};
InspectedStore inspect_store(IoEngine& io, FileId file, Nanoseconds patience = kPatience);

// Index of each drive's record of the newest commit that all drives hold; empty: there is none.
std::vector<std::size_t> newest_common(const std::vector<InspectedStore>& drives);

// What several files amount to, whoever asks: what is refused is refused by train and by verify.
struct StoreOutlook {
  enum class State : std::uint8_t {
    empty,      // no commit was ever complete: nothing is lost when the files go
    committed,  // some file holds a commit
    damaged,
  };
  State state = State::empty;
  bool complete = false;            // they are all drives of one store, each once
  std::vector<std::size_t> commit;  // newest_common()
  std::size_t drive = 0;            // damaged: which, and why
  std::string why;
};
StoreOutlook judge(const std::vector<InspectedStore>& drives);

}  // namespace terrace
