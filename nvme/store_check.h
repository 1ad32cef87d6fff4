// Whether a store's files hold what they say: found in any directories, read, never changed.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "nvme/store_format.h"
#include "nvme/store_geometry.h"
#include "nvme/store_inspect.h"
#include "terrace/io_engine.h"

namespace terrace {

struct FoundDrive {
  std::string directory;
  std::string path;
  FileId file;  // open for reading until the engine is destroyed
  InspectedStore store;
  std::optional<std::uint32_t> number{};  // in the store, as far as it can be told
};

struct FoundStore {
  std::vector<FoundDrive> drives;      // in the store's order; those without a superblock come last
  std::vector<std::uint32_t> missing;  // numbers of drives that no directory holds
  StoreOutlook outlook;

  const Superblock* superblock() const;  // of the first drive that has one
  // The commit that a resume continues; nullptr: there is none.
  const CommitRecord* newest() const;
  // The commit before newest() on one drive: index of its record, when the table is whole.
  std::optional<std::size_t> older(std::size_t drive) const;
};

// Finds the store whose drives lie in `directories`, given in any order. The engine must have a
// drive for each directory. Throws Error(unavailable) when there is none, Error(invalid_argument)
// when a directory holds none or another one's, Error(io) when a file cannot be read.
FoundStore find_store(IoEngine& io, const std::vector<std::string>& directories);
// Reads what the files say about themselves once more: a run may be committing meanwhile.
void inspect_again(IoEngine& io, FoundStore& store);

enum class StorePlace : std::uint8_t { file, header, text, record, table, segment };
std::string_view to_string(StorePlace place);

struct StoreDamage {
  StorePlace place = StorePlace::file;
  std::size_t drive = 0;  // index into FoundStore::drives
  std::size_t copy = 0;   // of headers, texts, records and tables
  Extent extent;          // in the drive's file
  std::string why;
  bool unreadable = false;  // the drive refuses to read it
  // Of segments.
  std::uint64_t segment = 0;
  std::string region{};
  std::uint64_t generation = 0;  // the step that wrote it
  std::uint64_t expected = 0;    // checksums
  std::uint64_t found = 0;
};

inline constexpr std::size_t kMostDamages = 10000;  // described; all are counted

struct StoreCheck {
  std::vector<StoreDamage> damages;  // by drive and offset
  std::uint64_t damaged = 0;         // all of them, the unreadable ones included
  std::uint64_t unreadable = 0;
  bool checksums = true;             // false: only what the files say about themselves was checked
  std::uint64_t segments = 0;        // of the newest commit that all drives hold
  std::uint64_t sound = 0;           // of them
  // Copies of the commit before, which the next step may be overwriting: no damage.
  std::uint64_t older_segments = 0;
  std::uint64_t older_sound = 0;
  Bytes read;                        // of segments
};

// Of bytes of segments; called now and then, on the caller's thread.
using CheckProgress = std::function<void(Bytes done, Bytes total)>;

// Nobody may be writing to the store. Throws Error(io) when a drive makes no progress.
StoreCheck check_store(IoEngine& io, const FoundStore& store, const CheckProgress& progress = {});

}  // namespace terrace
