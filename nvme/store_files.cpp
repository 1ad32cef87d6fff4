#include "nvme/store_files.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <random>

#include "nvme/checksum.h"
#include "nvme/page_buffer.h"
#include "terrace/error.h"

namespace terrace {
namespace {

std::string when(std::int64_t unix_time) {
  const auto time = static_cast<std::time_t>(unix_time);
  std::tm utc{};
  char text[32] = "";
  if (::gmtime_r(&time, &utc) != nullptr) {
    std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &utc);
  }
  return text;
}

class Opener {
 public:
  Opener(IoEngine& io, const StoreOptions& options) : io_(io), options_(options) {}

  OpenedStore run() {
    OpenedStore opened{{}, {}, 0, 0, StoreGeometry({}, {1}), {}, {}, {}};
    for (const auto& drive : options_.drives) opened.locks.emplace_back(drive.directory);
    look(opened);
    if (!opened.resumed) make(opened);
    return opened;
  }

 private:
  std::string path(std::size_t drive) const {
    return store_path(options_.drives[drive].directory);
  }

  // Decides what to do about what lies there; fills `opened` when it is continued.
  void look(OpenedStore& opened) {
    std::vector<std::size_t> found;
    for (std::size_t d = 0; d < options_.drives.size(); ++d) {
      if (io_.exists(path(d))) found.push_back(d);
    }
    if (found.empty()) {
      if (options_.mode == StoreMode::resume) opened.notes.push_back(nothing_there());
      return;
    }
    if (options_.mode == StoreMode::discard) return remove(found, opened);
    std::vector<FileId> files;
    try {
      std::vector<InspectedStore> stores;
      for (const auto d : found) {
        files.push_back(io_.open({.path = path(d), .size = {}, .mode = IoFileMode::existing,
                                  .drive = static_cast<std::uint32_t>(d)}));
        stores.push_back(inspect_store(io_, files.back()));
      }
      judge(found, stores, files, opened);
    } catch (...) {
      for (const auto file : files) io_.close(file);
      throw;
    }
    if (opened.resumed) return;
    for (const auto file : files) io_.close(file);
    remove(found, opened);
  }

  std::string nothing_there() const {
    std::string directories;
    for (const auto& drive : options_.drives) {
      directories += (directories.empty() ? "" : ", ") + drive.directory;
    }
    return "nothing to resume in " + directories + ": training starts anew";
  }

  void remove(const std::vector<std::size_t>& found, OpenedStore& opened) {
    for (const auto d : found) {
      io_.remove(path(d));
      if (options_.mode == StoreMode::discard) opened.notes.push_back("discarded " + path(d));
    }
  }

  // Throws when what was found must not be touched; continues it; or leaves `opened` as it was: a
  // store without a commit may go.
  void judge(const std::vector<std::size_t>& found, std::vector<InspectedStore>& stores,
             const std::vector<FileId>& files, OpenedStore& opened) {
    bool any_commit = false;
    for (std::size_t i = 0; i < found.size(); ++i) {
      refuse_damaged(path(found[i]), stores[i]);
      any_commit = any_commit || stores[i].any_commit();
    }
    if (!any_commit) {
      opened.notes.push_back(path(found.front()) +
                             " was left by a run that ended before its first commit: " +
                             (options_.mode == StoreMode::resume ? "training starts anew"
                                                                 : "it is replaced"));
      return;
    }
    if (options_.mode == StoreMode::fresh) refuse_committed(found, stores);
    if (found.size() < options_.drives.size()) {
      throw Error(ErrorCode::invalid_argument,
                  "a store lies in " + options_.drives[found.front()].directory + " and not in " +
                      options_.drives[missing(found)].directory +
                      "; name the directories of the run that made it");
    }
    refuse_difference(stores);
    resume(stores, files, opened);
  }

  static void refuse_damaged(const std::string& path, const InspectedStore& store) {
    if (store.sound() == nullptr && !store.unfinished) {
      throw Error(ErrorCode::corrupt, path + ": both copies of its superblock are damaged (" +
                                          store.superblock[0].why_not +
                                          "); if it is no loss, discard it (--discard)");
    }
    if (store.sound() == nullptr) return;
    for (std::size_t i = 0; i < 2; ++i) {
      if (store.any_commit() || store.record[i].blank) continue;
      const auto& why = store.record[i].record ? store.table_problem[i] : store.record[i].why_not;
      throw Error(ErrorCode::corrupt, path + ": commit record " + std::to_string(i) +
                                          " is damaged (" + why +
                                          ") and there is no other; if it is no loss, discard it "
                                          "(--discard)");
    }
  }

  std::size_t missing(const std::vector<std::size_t>& found) const {
    for (std::size_t d = 0; d < options_.drives.size(); ++d) {
      if (std::find(found.begin(), found.end(), d) == found.end()) return d;
    }
    return 0;
  }

  [[noreturn]] void refuse_committed(const std::vector<std::size_t>& found,
                                     const std::vector<InspectedStore>& stores) const {
    for (std::size_t i = 0; i < found.size(); ++i) {
      const CommitRecord* newest = nullptr;
      for (std::size_t r = 0; r < 2; ++r) {
        if (!stores[i].committed(r)) continue;
        const auto& record = *stores[i].record[r].record;
        if (newest == nullptr || record.generation > newest->generation) newest = &record;
      }
      if (newest == nullptr) continue;
      throw Error(ErrorCode::unavailable,
                  path(found[i]) + " holds step " + std::to_string(newest->step) +
                      " of a run, committed " + when(newest->unix_time) +
                      "; continue it (--resume), discard it (--discard), or name another "
                      "directory");
    }
    throw Error(ErrorCode::unavailable, "a committed store is in the way");
  }

  void refuse_difference(const std::vector<InspectedStore>& stores) const {
    const auto& first = *stores.front().sound();
    std::string difference;
    const auto differs = [&](const std::string& key, const std::string& there,
                             const std::string& here) {
      if (there != here) difference += "\n  " + key + ": " + there + " there, " + here + " here";
    };
    const auto value = [](const StoreIdentity& identity, const std::string& key) {
      for (const auto& [name, text] : identity) {
        if (name == key) return text;
      }
      return std::string("(absent)");
    };
    for (std::size_t d = 0; d < stores.size(); ++d) {
      const auto& superblock = *stores[d].sound();
      if (superblock.store == first.store && superblock.drive == d &&
          superblock.weights.size() == stores.size()) {
        continue;
      }
      differs("drive " + std::to_string(d),
              "drive " + std::to_string(superblock.drive) + " of " +
                  std::to_string(superblock.weights.size()) + " of store " +
                  std::to_string(superblock.store),
              "drive " + std::to_string(d) + " of " + std::to_string(stores.size()) +
                  " of store " + std::to_string(first.store));
    }
    for (const auto& [key, text] : options_.identity) {
      differs(key, value(first.identity, key), text);
    }
    for (const auto& [key, text] : first.identity) {
      if (value(options_.identity, key) == "(absent)") differs(key, text, "(absent)");
    }
    differs("checksums", first.checksums ? "on" : "off", options_.checksums ? "on" : "off");
    differs("layout of segments", layout_text(first.regions), layout_text(options_.durable));
    if (!difference.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  "the store in " + options_.drives.front().directory + " is of another run:" +
                      difference + "\nRepeat that run's settings, discard its store (--discard), "
                                   "or name another directory");
    }
  }

  static std::string layout_text(const std::vector<StoreRegion>& regions) {
    std::uint64_t hash = 0;
    Bytes end;
    for (const auto& region : regions) {
      const std::uint64_t parts[] = {hash, region.extent.offset.count, region.extent.size.count,
                                     region.segment.count};
      hash = hash_bytes(parts, sizeof parts);
      end = region.extent.end();
    }
    return std::to_string(regions.size()) + " regions of " + std::to_string(end.count) +
           " bytes in all, segments of up to " +
           std::to_string(regions.empty() ? 0 : regions.front().segment.count) + " (hash " +
           std::to_string(hash) + ")";
  }

  void resume(std::vector<InspectedStore>& stores, const std::vector<FileId>& files,
              OpenedStore& opened) const {
    const auto common = newest_common(stores);
    if (common.empty()) {
      throw Error(ErrorCode::corrupt,
                  "no commit is held by all drives of the store in " +
                      options_.drives.front().directory +
                      "; see `terrace store verify`, or discard it (--discard)");
    }
    const auto& superblock = *stores.front().sound();
    opened.id = superblock.store;
    opened.geometry = StoreGeometry(superblock.regions, superblock.weights);
    for (std::size_t d = 0; d < stores.size(); ++d) {
      const auto& record = *stores[d].record[common[d]].record;
      opened.files.push_back(
          {path(d), files[d], stores[d].layout, common[d], record.bytes_written});
      opened.entries.push_back(std::move(stores[d].table[common[d]]));
      for (const auto& other : stores[d].record) {
        if (other.record) {
          opened.generation = std::max(opened.generation, other.record->generation);
        }
      }
    }
    opened.resumed = *stores.front().record[common.front()].record;
  }

  // ---- a new store

  void make(OpenedStore& opened) const {
    std::vector<double> speeds;
    for (const auto& drive : options_.drives) speeds.push_back(drive.speed);
    opened.geometry = StoreGeometry(options_.durable, stripe_weights(speeds));
    std::random_device random;
    opened.id = (std::uint64_t{random()} << 32 | random()) >> 1;
    try {
      for (std::size_t d = 0; d < options_.drives.size(); ++d) make_file(d, opened);
    } catch (...) {
      for (const auto& file : opened.files) {
        io_.close(file.file);
        io_.remove(file.path);
      }
      throw;
    }
  }

  void make_file(std::size_t d, OpenedStore& opened) const {
    const auto drive = static_cast<std::uint32_t>(d);
    const auto layout =
        store_file_layout(opened.geometry.shares()[d], opened.geometry.regions().size());
    const Superblock superblock{opened.id,          drive,        opened.geometry.weights(),
                                options_.checksums, options_.identity, options_.durable};
    const auto encoded = encode(superblock, layout.text_bytes);
    const FileId file = io_.open({.path = path(d), .size = layout.size,
                                  .mode = IoFileMode::create, .direct = true, .drive = drive,
                                  .keep_free = options_.drives[d].keep_free});
    opened.files.push_back({path(d), file, layout, 1, 0});
    BlockingIo io(io_);
    const auto write = [&](Bytes offset, const std::vector<std::byte>& bytes) {
      PageBuffer buffer({bytes.size()});
      std::memcpy(buffer.data(), bytes.data(), bytes.size());
      io.write(file, offset, buffer.span());
    };
    // A header makes it a store: each is written when all before it is durable, so that a creation
    // cut short is known by its blank second header. What lay there before must not pass for a
    // record.
    const std::vector<std::byte> blank(kRecordBytes.count);
    for (const auto record : layout.record) write(record, blank);
    for (const auto text : layout.text) write(text, encoded.text);
    for (const auto header : layout.header) write(header, std::vector<std::byte>(kStorePage.count));
    io.flush(file);
    for (const auto header : layout.header) {
      write(header, encoded.header);
      io.flush(file);
    }
  }

  IoEngine& io_;
  const StoreOptions& options_;
};

}  // namespace

std::string store_path(const std::string& directory) { return directory + "/terrace.store"; }

OpenedStore open_store(IoEngine& io, const StoreOptions& options) {
  return Opener(io, options).run();
}

}  // namespace terrace
