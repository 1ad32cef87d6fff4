#include "nvme/store_check.h"

#include <algorithm>
#include <utility>

#include "nvme/segment_check.h"
#include "nvme/store_files.h"
#include "terrace/error.h"

namespace terrace {
namespace {

Error other_stores(const std::string& what) {
  return {ErrorCode::invalid_argument, what + "; name the directories of one store"};
}

std::string listed(const std::vector<std::string>& directories) {
  std::string text;
  for (const auto& directory : directories) text += (text.empty() ? "" : ", ") + directory;
  return text;
}

void open_files(IoEngine& io, const std::vector<std::string>& directories, FoundStore& found) {
  std::string without;
  for (std::size_t d = 0; d < directories.size(); ++d) {
    const auto path = store_path(directories[d]);
    if (!io.exists(path)) {
      without = directories[d];
      continue;
    }
    const FileId file = io.open({.path = path, .size = {}, .mode = IoFileMode::existing,
                                 .drive = static_cast<std::uint32_t>(d), .read_only = true});
    found.drives.push_back({directories[d], path, file, inspect_store(io, file)});
  }
  if (found.drives.empty()) {
    throw Error(ErrorCode::unavailable,
                "there is no store in " + listed(directories) +
                    "; name the directories that a run was given with --nvme");
  }
  if (!without.empty()) throw other_stores("there is no store in " + without);
}

// Complains about drives that are not of one store. Those without a superblock are what is left.
void number_drives(FoundStore& found) {
  const auto* first = found.superblock();
  if (first == nullptr) return;
  std::vector<const FoundDrive*> holders(first->weights.size());
  std::vector<FoundDrive*> unknown;
  for (auto& drive : found.drives) {
    const auto* superblock = drive.store.sound();
    if (superblock == nullptr) {
      unknown.push_back(&drive);
      continue;
    }
    if (superblock->store != first->store || superblock->weights.size() != holders.size()) {
      throw other_stores(found.drives.front().directory + " and " + drive.directory +
                         " hold drives of two stores");
    }
    auto& holder = holders[superblock->drive];
    if (holder != nullptr) {
      throw other_stores(holder->directory + " and " + drive.directory + " both hold drive " +
                         std::to_string(superblock->drive));
    }
    holder = &drive;
    drive.number = superblock->drive;
  }
  for (std::uint32_t d = 0; d < holders.size(); ++d) {
    if (holders[d] == nullptr) found.missing.push_back(d);
  }
  if (found.missing.size() != unknown.size()) return;
  for (std::size_t i = 0; i < unknown.size() && unknown.size() == 1; ++i) {
    unknown[i]->number = found.missing[i];
  }
  found.missing.clear();
}

void judge_all(FoundStore& found) {
  std::vector<InspectedStore> stores;
  for (const auto& drive : found.drives) stores.push_back(drive.store);
  found.outlook = judge(stores);
}

// What the files say about themselves.
class MetadataCheck {
 public:
  MetadataCheck(const FoundStore& found, StoreCheck& check) : found_(found), check_(check) {}

  void run() {
    for (drive_ = 0; drive_ < found_.drives.size(); ++drive_) {
      const auto& store = found_.drives[drive_].store;
      if (store.unfinished) {
        add(StorePlace::file, 0, {{}, store.file_size}, "its creation was cut short");
        continue;
      }
      headers(store);
      texts(store);
      if (store.cut_short) {
        add(StorePlace::file, 0, {store.file_size, store.layout.size - store.file_size},
            store.record[0].why_not);
      } else if (store.sound() != nullptr) {
        if (store.lost_spares > 0) {
          add(StorePlace::file, 0, {store.file_size, store.layout.size - store.file_size},
              "it is cut short by " + std::to_string(store.lost_spares) + " of " +
                  std::to_string(store.lost_spares + store.layout.spare_count) +
                  " spares, which held nothing of the last commit");
        }
        for (std::size_t i = 0; i < 2; ++i) record(store, i);
      }
    }
  }

 private:
  void add(StorePlace place, std::size_t copy, Extent extent, std::string why) {
    add_damage(check_, {place, drive_, copy, extent, std::move(why)});
  }

  void headers(const InspectedStore& store) {
    const auto layout = store_file_layout({}, 0);
    for (std::size_t i = 0; i < 2; ++i) {
      const auto& header = store.header[i];
      const Extent extent{layout.header[i], kStorePage};
      if (!header.header) {
        add(StorePlace::header, i, extent, header.blank ? "it is blank" : header.why_not);
      } else if (i == 1 && store.header[0].header && !(*store.header[0].header == *header.header)) {
        add(StorePlace::header, i, extent, "it is not the same as the first one");
      }
    }
  }

  void texts(const InspectedStore& store) {
    const auto& header = store.header[0].header ? store.header[0] : store.header[1];
    if (!header.header) return;
    const auto layout = store_file_layout({}, 0);
    const Bytes size = header.header->text_bytes;
    for (std::size_t i = 0; i < 2; ++i) {
      if (store.superblock[i].superblock) continue;
      add(StorePlace::text, i, {layout.text[0] + size * i, size}, store.superblock[i].why_not);
    }
  }

  // The table and the trainer's bytes of an older commit, or of one that has not reached all
  // drives, are overwritten before its record is: that is no damage.
  void record(const InspectedStore& store, std::size_t i) {
    const auto& record = store.record[i];
    if (!record.record) {
      if (record.blank) return;
      return add(StorePlace::record, i, {store.layout.record[i], kRecordBytes}, record.why_not);
    }
    const auto& other = store.record[1 - i].record;
    const bool newest = !other || other->generation < record.record->generation;
    if (store.table_problem[i].empty() || !newest || !on_all(record.record->generation)) return;
    const std::string which = "of step " + std::to_string(record.record->step) + ": ";
    if (store.table_problem[i] == record.trainer_problem) {
      return add(StorePlace::record, i, {store.layout.record[i], kRecordBytes},
                 which + record.trainer_problem);
    }
    add(StorePlace::table, record.record->table,
        {store.layout.table[record.record->table], store.layout.table_bytes},
        "of record " + std::to_string(i) + ", step " + std::to_string(record.record->step) + ": " +
            store.table_problem[i]);
  }

  bool on_all(std::uint64_t generation) const {
    return std::all_of(found_.drives.begin(), found_.drives.end(), [&](const FoundDrive& drive) {
      return std::any_of(std::begin(drive.store.record), std::end(drive.store.record),
                         [&](const DecodedRecord& record) {
                           return record.record && record.record->generation == generation;
                         });
    });
  }

  const FoundStore& found_;
  StoreCheck& check_;
  std::size_t drive_ = 0;
};

}  // namespace

const Superblock* FoundStore::superblock() const {
  for (const auto& drive : drives) {
    if (const auto* sound = drive.store.sound()) return sound;
  }
  return nullptr;
}

const CommitRecord* FoundStore::newest() const {
  if (outlook.commit.empty()) return nullptr;
  return &*drives.front().store.record[outlook.commit.front()].record;
}

std::optional<std::size_t> FoundStore::older(std::size_t drive) const {
  if (outlook.commit.empty()) return {};
  const auto i = outlook.commit[drive];
  const auto& store = drives[drive].store;
  if (!store.committed(1 - i)) return {};
  const auto generation = store.record[1 - i].record->generation;
  return generation < store.record[i].record->generation ? std::optional(1 - i) : std::nullopt;
}

FoundStore find_store(IoEngine& io, const std::vector<std::string>& directories) {
  FoundStore found;
  open_files(io, directories, found);
  number_drives(found);
  std::stable_sort(found.drives.begin(), found.drives.end(), [](const auto& a, const auto& b) {
    return a.number && (!b.number || *a.number < *b.number);
  });
  judge_all(found);
  return found;
}

void inspect_again(IoEngine& io, FoundStore& store) {
  for (auto& drive : store.drives) drive.store = inspect_store(io, drive.file);
  judge_all(store);
}

std::string_view to_string(StorePlace place) {
  switch (place) {
    case StorePlace::file: return "file";
    case StorePlace::header: return "header";
    case StorePlace::text: return "text";
    case StorePlace::record: return "record";
    case StorePlace::table: return "table";
    case StorePlace::segment: return "segment";
  }
  return "";
}

StoreCheck check_store(IoEngine& io, const FoundStore& store, const CheckProgress& progress) {
  StoreCheck check;
  MetadataCheck(store, check).run();
  check_segments(io, store, progress, check);
  std::stable_sort(check.damages.begin(), check.damages.end(), [](const auto& a, const auto& b) {
    return std::pair(a.drive, a.extent.offset) < std::pair(b.drive, b.extent.offset);
  });
  return check;
}

}  // namespace terrace
