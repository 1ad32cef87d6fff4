// The files of a store: made, or found and continued. Blocking; nothing else is in flight.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "nvme/store_format.h"
#include "nvme/store_geometry.h"
#include "nvme/store_inspect.h"
#include "nvme/store_lock.h"
#include "terrace/config.h"
#include "terrace/io_engine.h"

namespace terrace {

struct StoreDrive {
  std::string directory;
  double speed = 1;  // relative to the other drives
  Bytes keep_free;   // of its file system
};

struct StoreOptions {
  std::vector<StoreDrive> drives;
  std::vector<StoreRegion> durable;  // from address 0: two slots, committed; may be empty
  std::vector<StoreRegion> scratch;  // behind it, at kept segments
  Bytes transient;                   // the first address that holds nothing between operations
  StoreIdentity identity;
  StoreMode mode = StoreMode::fresh;
  bool checksums = true;
  Bytes transient_tile = 128_KiB;    // of checksums there
  // An operation that makes no progress for so long fails the store.
  Nanoseconds patience = kPatience;
  // What lies at an extent, for messages: layer, content, tensors.
  std::function<std::string(Extent)> describe;
};

std::string store_path(const std::string& directory);

// One drive's terrace.store.
struct StoreFile {
  std::string path;
  FileId file;
  StoreFileLayout layout;
  std::size_t active = 1;           // the record and table that are committed
  std::uint64_t bytes_written = 0;  // up to the commit it was opened at
};

struct OpenedStore {
  std::vector<StoreLock> locks;
  std::vector<StoreFile> files;      // by drive
  std::uint64_t id = 0;
  std::uint64_t generation = 0;      // of the newest commit ever seen
  StoreGeometry geometry;            // of the durable part
  std::optional<CommitRecord> resumed;
  std::vector<std::vector<TableEntry>> entries;  // by drive, when resumed
  std::vector<std::string> notes;    // what was found and done about it
};

// Takes the locks and makes or continues the files. When it throws, what it made is gone again; an
// operation that never ended is then still pending, and the engine must not be destroyed.
// Error(unavailable): in use, or a committed store in the way; Error(invalid_argument): another
// model, seed or layout; Error(corrupt): damaged.
OpenedStore open_store(IoEngine& io, const StoreOptions& options);

// Closes the files and removes those that were made: the way back after an error, which is what the
// caller reports.
void unmake(IoEngine& io, const OpenedStore& opened) noexcept;

// Removes what lies in the directories, under their locks; says what was removed.
std::vector<std::string> discard_store(IoEngine& io, const StoreOptions& options);

}  // namespace terrace
