#include "nvme/store_inspect.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "nvme/checksum.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr Bytes kScan = 1_MiB;  // read at a time
constexpr Bytes kRecordsEnd = 130_MiB;  // with texts of the largest size

// Without a header the offsets of the records are unknown.
bool any_record(BlockingIo& io, FileId file, Bytes file_size) {
  PageBuffer buffer(kScan);
  const Bytes end = std::min(file_size, kRecordsEnd);
  for (Bytes offset; offset < end; offset += kScan) {
    const auto part = buffer.span().first(std::min(kScan, end - offset).count);
    io.read(file, offset, part);
    for (std::size_t page = 0; page < part.size(); page += kStorePage.count) {
      if (looks_like_record(part.subspan(page))) return true;
    }
  }
  return false;
}

// The headers tell where the texts lie; either header will do, and either text.
void read_superblocks(BlockingIo& io, FileId file, Bytes file_size, InspectedStore& found) {
  const auto layout = store_file_layout({}, 0);
  for (std::size_t i = 0; i < 2; ++i) {
    std::vector<std::byte> page(kStorePage.count);
    io.read(file, layout.header[i], page);
    found.header[i] = decode_header(page);
  }
  const auto& sound = found.header[0].header ? found.header[0] : found.header[1];
  const bool blank = !sound.header && found.header[1].blank;
  found.unfinished = blank && !any_record(io, file, file_size);
  for (std::size_t i = 0; i < 2; ++i) {
    auto& copy = found.superblock[i];
    copy.why_not = "its header is damaged: " + sound.why_not;
    if (!sound.header) continue;
    const Bytes offset = layout.text[0] + sound.header->text_bytes * i;
    copy.why_not = "the file is cut short";
    if (offset + sound.header->text_bytes > file_size) continue;
    std::vector<std::byte> text(sound.header->text_bytes.count);
    io.read(file, offset, text);
    copy = decode_superblock(*sound.header, text);
  }
}

void read_table(BlockingIo& io, FileId file, const StoreGeometry& geometry, std::uint32_t drive,
                std::uint64_t store, std::size_t i, InspectedStore& found) {
  auto& record = found.record[i];
  auto& problem = found.table_problem[i];
  if (!record.record) return;
  if (record.record->store != store || record.record->drive != drive) {
    record.why_not = "it belongs to another store or drive";
    record.record.reset();
    return;
  }
  const auto count = geometry.shares()[drive].segments;
  if (record.record->segments != count) {
    problem = "its number of segments is wrong";
    return;
  }
  auto& table = found.table[i];
  table.resize(count);
  if (count > 0) {
    std::vector<std::byte> buffer(found.layout.table_bytes.count);
    io.read(file, found.layout.table[record.record->table], buffer);
    std::memcpy(table.data(), buffer.data(), count * sizeof(TableEntry));
  }
  if (hash_bytes(table.data(), count * sizeof(TableEntry)) != record.record->table_checksum) {
    problem = "its table's checksum is wrong";
  } else {
    problem = table_problem(table, geometry, drive, found.layout);
  }
  if (problem.empty()) problem = record.trainer_problem;
}

}  // namespace

// ---- blocking calls

// The memory is this class's: when the operation never ends, it is never freed.
const char* transfer_remedy(int error) {
  switch (error) {
    case ENOSPC: return "free space on that file system";
    case EDQUOT: return "raise the quota of that file system";
    case EFBIG: return "raise the file size limit (ulimit -f)";
    case ENODATA: return "the file was cut short: see who did, and `terrace store verify`";
    case ECANCELED: return "raise the limit of processes (ulimit -u), or choose another I/O engine";
    case EROFS: return "mount that file system writable";
    case EINTR:
    case EAGAIN: return "it makes no progress: see the kernel's log, or choose another I/O engine";
    default: return "see the kernel's log: the drive or the way to it is at fault";
  }
}

std::string seconds_text(Nanoseconds time) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", to_seconds(time));
  return text;
}

void BlockingIo::run(IoOperation operation, FileId file, Bytes offset, PageBuffer& buffer) {
  const auto failed = [&](const std::string& why) {
    const char* what = operation == IoOperation::read    ? "reading "
                       : operation == IoOperation::write ? "writing "
                                                         : "flushing ";
    return Error(ErrorCode::io, what + std::to_string(buffer.size()) + " bytes at offset " +
                                    std::to_string(offset.count) + " of " +
                                    io_.file_info(file).path + " failed: " + why);
  };
  TERRACE_CHECK(io_.submit(
      {Ticket{}, operation, file, offset.count, buffer.data(), buffer.size()}));
  io_.flush();
  std::vector<Completion> completions;
  const auto deadline = steady_clock().now() + patience_;
  while (completions.empty()) {
    io_.reap(completions, std::min<Nanoseconds>(patience_, std::chrono::milliseconds(100)));
    if (!completions.empty() || steady_clock().now() < deadline) continue;
    buffer.abandon();
    throw failed(std::string(std::strerror(ETIMEDOUT)) + ": it has not ended for " +
                 seconds_text(patience_) + "; see the kernel's log");
  }
  const auto& done = completions.front();
  if (done.error != 0) {
    throw failed(std::string(std::strerror(done.error)) + "; " + transfer_remedy(done.error));
  }
  if (operation != IoOperation::flush && done.bytes != buffer.size()) {
    throw failed(std::string("it was cut short; ") + transfer_remedy(EIO));
  }
}

void BlockingIo::read(FileId file, Bytes offset, std::span<std::byte> memory) {
  PageBuffer buffer({memory.size()});
  run(IoOperation::read, file, offset, buffer);
  std::memcpy(memory.data(), buffer.data(), memory.size());
}

void BlockingIo::write(FileId file, Bytes offset, std::span<const std::byte> memory) {
  PageBuffer buffer({memory.size()});
  std::memcpy(buffer.data(), memory.data(), memory.size());
  run(IoOperation::write, file, offset, buffer);
}

void BlockingIo::flush(FileId file) {
  PageBuffer none;
  run(IoOperation::flush, file, {}, none);
}

// ---- looking

const Superblock* InspectedStore::sound() const {
  for (const auto& copy : superblock) {
    if (copy.superblock) return &*copy.superblock;
  }
  return nullptr;
}

bool InspectedStore::given_up(std::size_t i) const {
  const auto& own = record[i].record;
  const auto& other = record[1 - i].record;
  return own && other && !committed(i) && other->generation > own->generation;
}

bool InspectedStore::at_first_commit() const {
  constexpr std::uint64_t kFirst = 1;
  return std::all_of(std::begin(record), std::end(record), [](const DecodedRecord& found) {
    return found.record ? found.record->generation == kFirst : found.blank;
  });
}

InspectedStore inspect_store(IoEngine& engine, FileId file, Nanoseconds patience) {
  BlockingIo io(engine, patience);
  InspectedStore found;
  const Bytes size = engine.file_info(file).size;
  found.file_size = size;
  if (size < kStorePage * 2) {
    found.unfinished = true;
    return found;
  }
  read_superblocks(io, file, size, found);
  const Superblock* superblock = found.sound();
  if (superblock == nullptr) return found;
  const StoreGeometry geometry(superblock->regions, superblock->weights);
  found.layout = store_file_layout(geometry.shares()[superblock->drive],
                                   superblock->regions.size());
  if (found.layout.size > size && size >= found.layout.spares) {
    const auto left = (size - found.layout.spares).count / found.layout.spare_bytes.count;
    found.lost_spares = found.layout.spare_count - left;
    found.layout.spare_count = left;
  } else if (found.layout.size > size) {
    found.cut_short = true;
    for (std::size_t i = 0; i < 2; ++i) {
      found.record[i].why_not = "the file is cut short: its whole pages have " +
                                std::to_string(size.count) + " of " +
                                std::to_string(found.layout.size.count) + " bytes";
    }
    return found;
  }
  for (std::size_t i = 0; i < 2; ++i) {
    std::vector<std::byte> buffer(kRecordBytes.count);
    io.read(file, found.layout.record[i], buffer);
    found.record[i] = decode_record(buffer);
    read_table(io, file, geometry, superblock->drive, superblock->store, i, found);
  }
  return found;
}

std::vector<std::size_t> newest_common(const std::vector<InspectedStore>& drives) {
  std::vector<std::size_t> best;
  std::uint64_t best_generation = 0;
  for (std::size_t i = 0; i < 2; ++i) {
    if (!drives.front().committed(i)) continue;
    const auto generation = drives.front().record[i].record->generation;
    std::vector<std::size_t> indexes;
    for (const auto& drive : drives) {
      for (std::size_t j = 0; j < 2; ++j) {
        if (drive.committed(j) && drive.record[j].record->generation == generation) {
          indexes.push_back(j);
          break;
        }
      }
    }
    if (indexes.size() != drives.size() || generation <= best_generation) continue;
    best = indexes;
    best_generation = generation;
  }
  return best;
}

// ---- judging

namespace {

bool complete(const std::vector<InspectedStore>& drives) {
  const Superblock* first = drives.front().sound();
  std::vector<bool> seen(drives.size());
  for (const auto& drive : drives) {
    const Superblock* superblock = drive.sound();
    if (first == nullptr || superblock == nullptr || superblock->store != first->store ||
        superblock->weights.size() != drives.size() || seen[superblock->drive]) {
      return false;
    }
    seen[superblock->drive] = true;
  }
  return true;
}

// Why the file, taken alone, is no store that may be continued or replaced.
std::string damage_of(const InspectedStore& drive) {
  if (drive.unfinished) return "";
  if (drive.sound() == nullptr) {
    return "both copies of its superblock are damaged (" + drive.superblock[0].why_not + ")";
  }
  if (drive.cut_short) return drive.record[0].why_not;
  for (std::size_t i = 0; i < 2; ++i) {
    if (drive.any_commit() || drive.record[i].blank) continue;
    return "commit record " + std::to_string(i) + " is damaged (" +
           (drive.record[i].record ? drive.table_problem[i] : drive.record[i].why_not) +
           ") and there is no other";
  }
  return "";
}

// No drive begins a commit before the one before it is complete on all of them: when the first is
// the only one and some drives know of none, it was cut short.
bool first_commit_cut_short(const std::vector<InspectedStore>& drives) {
  return std::all_of(drives.begin(), drives.end(),
                     [](const InspectedStore& drive) { return drive.at_first_commit(); });
}

}  // namespace

StoreOutlook judge(const std::vector<InspectedStore>& drives) {
  StoreOutlook outlook;
  const auto damaged = [&](std::size_t drive, std::string why) {
    outlook.state = StoreOutlook::State::damaged;
    outlook.drive = drive;
    outlook.why = std::move(why);
    return outlook;
  };
  bool any_commit = false;
  for (std::size_t d = 0; d < drives.size(); ++d) {
    if (auto why = damage_of(drives[d]); !why.empty()) return damaged(d, std::move(why));
    any_commit = any_commit || drives[d].any_commit();
  }
  outlook.complete = complete(drives);
  if (!any_commit) return outlook;
  for (std::size_t d = 0; d < drives.size(); ++d) {
    if (!drives[d].unfinished) continue;
    return damaged(d, "it is blank, and the store's other drives are not");
  }
  outlook.commit = newest_common(drives);
  outlook.state = StoreOutlook::State::committed;
  if (!outlook.complete || !outlook.commit.empty()) return outlook;
  if (first_commit_cut_short(drives)) {
    outlook.state = StoreOutlook::State::empty;
    return outlook;
  }
  return damaged(0, "no commit is held by all drives of the store");
}

}  // namespace terrace
