// What a store writes about itself: superblock, segment table and commit record, to bytes and back.
// Decoders take any bytes: what is not exactly what an encoder made is refused with a reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "nvme/store_geometry.h"

namespace terrace {

// What must be the same for a store to be continued; compared key by key.
using StoreIdentity = std::vector<std::pair<std::string, std::string>>;

// Written once, twice over, when a store is made.
struct Superblock {
  std::uint64_t store = 0;  // random id, the same on all drives of a store
  std::uint32_t drive = 0;  // this one
  std::vector<std::uint32_t> weights;  // of all drives
  bool checksums = true;
  StoreIdentity identity;
  std::vector<StoreRegion> regions;
};

// A header page, which says how long the text is and what it hashes to, and the text. Throws
// Error(invalid_argument) when the identity lines are longer than kIdentityBytes.
struct EncodedSuperblock {
  std::vector<std::byte> header;  // kStorePage
  std::vector<std::byte> text;    // StoreFileLayout::text_bytes
};
EncodedSuperblock encode(const Superblock& superblock, Bytes text_bytes);

struct SuperblockHeader {
  Bytes text_bytes;  // of each copy, whole pages
  std::uint64_t text_used = 0;
  std::uint64_t text_checksum = 0;
  friend bool operator==(const SuperblockHeader&, const SuperblockHeader&) = default;
};
struct DecodedHeader {
  std::optional<SuperblockHeader> header;
  std::string why_not;
  bool blank = false;  // never written
};
DecodedHeader decode_header(std::span<const std::byte> page);
// Either what was encoded, or why it is none.
struct DecodedSuperblock {
  std::optional<Superblock> superblock;
  std::string why_not;
};
DecodedSuperblock decode_superblock(const SuperblockHeader& header,
                                    std::span<const std::byte> text);

// The committed place of one segment.
struct TableEntry {
  std::uint64_t offset = 0;      // in the drive's file
  std::uint64_t checksum = 0;    // 0: checksums are off
  std::uint64_t generation = 0;  // the step that wrote it
  std::uint32_t segment = 0;     // of the store
  std::uint32_t length = 0;      // bytes
  friend bool operator==(const TableEntry&, const TableEntry&) = default;
};
static_assert(sizeof(TableEntry) == kTableEntryBytes);

// Makes a whole step current on one drive, once it is durable on all. A page that counts, of which
// only the first sector is used, so that a power cut leaves the old one or the new one; before it
// is written the trainer's bytes lie behind it, durable like everything else it speaks of.
struct CommitRecord {
  std::uint64_t store = 0;
  std::uint64_t generation = 0;      // of the commit: grows by one, never used twice
  std::uint64_t step = 0;
  std::uint64_t table_checksum = 0;  // over the table's entries
  std::uint64_t segments = 0;        // entries in the table
  std::uint64_t bytes_written = 0;   // to this drive's files since the store was made
  std::int64_t unix_time = 0;
  std::uint32_t drive = 0;
  std::uint32_t table = 0;           // which of the two
  std::string trainer;               // the trainer's own bytes
};

// "2026-01-31 12:00:00 UTC"
std::string time_text(std::int64_t unix_time);

// The most trainer bytes that a record takes.
std::size_t most_trainer_bytes();
// The page that counts, and whole pages of the trainer's bytes.
std::vector<std::byte> encode(const CommitRecord& record);
struct DecodedRecord {
  std::optional<CommitRecord> record;
  std::string why_not;
  bool blank = false;  // never written, whatever lies behind the page that counts
  // "": the trainer's bytes are those of the record. The next commit but one overwrites them, as it
  // does the table, before it does the record.
  std::string trainer_problem{};
};
DecodedRecord decode_record(std::span<const std::byte> bytes);
// Whether a record begins here, sound or not.
bool looks_like_record(std::span<const std::byte> bytes);

// "" when every entry lies where one of this drive may lie, in order; otherwise what is wrong.
std::string table_problem(std::span<const TableEntry> entries, const StoreGeometry& geometry,
                          std::uint32_t drive, const StoreFileLayout& layout);

}  // namespace terrace
