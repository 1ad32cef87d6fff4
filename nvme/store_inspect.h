// What a store's files say about themselves, read without changing them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "nvme/store_format.h"
#include "nvme/store_geometry.h"
#include "terrace/io_engine.h"

namespace terrace {

// Blocking calls; each throws Error(io) that names path, offset and bytes.
class BlockingIo {
 public:
  explicit BlockingIo(IoEngine& io) : io_(io) {}
  void read(FileId file, Bytes offset, std::span<std::byte> memory);
  void write(FileId file, Bytes offset, std::span<std::byte> memory);
  void flush(FileId file);

 private:
  void run(IoOperation operation, FileId file, Bytes offset, std::span<std::byte> memory);
  IoEngine& io_;
};

// What a file says about itself, read without changing it.
struct InspectedStore {
  DecodedHeader header[2];
  DecodedSuperblock superblock[2];
  DecodedRecord record[2];
  std::vector<TableEntry> table[2];  // that of record i
  std::string table_problem[2];      // "": the table is sound
  StoreFileLayout layout;            // void without a superblock
  bool unfinished = false;           // its creation was cut short: it never held anything

  const Superblock* sound() const;
  bool committed(std::size_t i) const { return record[i].record && table_problem[i].empty(); }
  bool any_commit() const { return committed(0) || committed(1); }
};
InspectedStore inspect_store(IoEngine& io, FileId file);

// Index of each drive's record of the newest commit that all drives hold; empty: there is none.
std::vector<std::size_t> newest_common(const std::vector<InspectedStore>& drives);

}  // namespace terrace
