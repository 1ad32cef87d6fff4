#include "nvme/store_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <random>

#include "nvme/checksum.h"
#include "terrace/error.h"

namespace terrace {
namespace {

class Opener {
 public:
  Opener(IoEngine& io, const StoreOptions& options) : io_(io), options_(options) {}

  OpenedStore discard() {
    auto opened = look();
    remove(opened);
    return opened;
  }
  OpenedStore open() {
    auto opened = look();
    if (!opened.resumed) make(opened);
    return opened;
  }

 private:
  std::string path(std::size_t drive) const {
    return store_path(options_.drives[drive].directory);
  }

  OpenedStore look() {
    OpenedStore opened{{}, {}, 0, 0, StoreGeometry({}, {1}), {}, {}, {}};
    for (const auto& drive : options_.drives) opened.locks.emplace_back(drive.directory);
    look(opened);
    return opened;
  }

  // Decides what to do about what lies there: fills `opened` when it is continued, notes what goes
  // when not.
  void look(OpenedStore& opened) {
    std::vector<std::size_t> found;
    for (std::size_t d = 0; d < options_.drives.size(); ++d) {
      if (io_.exists(path(d))) found.push_back(d);
    }
    if (found.empty()) {
      if (options_.mode == StoreMode::resume) opened.notes.push_back(nothing_there());
      return;
    }
    if (options_.mode == StoreMode::discard) {
      refuse_part(found);
      in_the_way_ = found;
      return;
    }
    std::vector<FileId> files;
    try {
      std::vector<InspectedStore> stores;
      for (const auto d : found) {
        files.push_back(io_.open({.path = path(d), .size = {}, .mode = IoFileMode::existing,
                                  .drive = static_cast<std::uint32_t>(d)}));
        stores.push_back(inspect_store(io_, files.back(), options_.patience));
      }
      judge(found, stores, files, opened);
    } catch (...) {
      if (io_.pending() == 0) {
        for (const auto file : files) io_.close(file);
      }
      throw;
    }
    if (opened.resumed) return;
    for (const auto file : files) io_.close(file);
    in_the_way_ = found;
  }

  std::string nothing_there() const {
    std::string directories;
    for (const auto& drive : options_.drives) {
      directories += (directories.empty() ? "" : ", ") + drive.directory;
    }
    return "nothing to resume in " + directories + ": training starts anew";
  }

  void remove(OpenedStore& opened) const {
    for (const auto d : in_the_way_) {
      io_.remove(path(d));
      if (options_.mode == StoreMode::discard) opened.notes.push_back("discarded " + path(d));
    }
  }

  // Discarding some of a store's drives would leave the others as scrap that takes space.
  void refuse_part(const std::vector<std::size_t>& found) const {
    std::map<std::uint64_t, std::size_t> named;  // drives of a store
    std::vector<std::pair<std::size_t, Superblock>> superblocks;
    for (const auto d : found) {
      if (auto superblock = superblock_of(d)) {
        ++named[superblock->store];
        superblocks.emplace_back(d, std::move(*superblock));
      }
    }
    for (const auto& [d, superblock] : superblocks) {
      if (named[superblock.store] >= superblock.weights.size()) continue;
      throw Error(ErrorCode::invalid_argument,
                  path(d) + " is drive " + std::to_string(superblock.drive) + " of " +
                      std::to_string(superblock.weights.size()) +
                      " of a store; name the directories of all of them to discard it, or remove "
                      "this file by hand");
    }
  }

  // What can be read of it; a file that is broken may go.
  std::optional<Superblock> superblock_of(std::size_t d) const {
    std::optional<Superblock> result;
    std::optional<FileId> file;
    try {
      file = io_.open({.path = path(d), .size = {}, .mode = IoFileMode::existing,
                       .drive = static_cast<std::uint32_t>(d)});
      const auto store = inspect_store(io_, *file, options_.patience);
      if (store.sound() != nullptr) result = *store.sound();
    } catch (const Error&) {
      if (io_.pending() > 0) throw;
    }
    if (file) io_.close(*file);
    return result;
  }

  // Throws when what was found must not be touched; continues it; or leaves `opened` as it was: a
  // store without a commit may go.
  void judge(const std::vector<std::size_t>& found, std::vector<InspectedStore>& stores,
             const std::vector<FileId>& files, OpenedStore& opened) {
    const auto outlook = terrace::judge(stores);
    if (outlook.state == StoreOutlook::State::damaged) {
      throw Error(ErrorCode::corrupt, path(found[outlook.drive]) + ": " + outlook.why +
                                          "; see `terrace store verify`, and discard it "
                                          "(--discard) if it is no loss");
    }
    if (outlook.state == StoreOutlook::State::empty) {
      opened.notes.push_back(path(found.front()) +
                             " was left by a run that ended before its first commit did: " +
                             (options_.mode == StoreMode::resume ? "training starts anew"
                                                                 : "it is replaced"));
      return;
    }
    if (options_.mode == StoreMode::fresh) refuse_committed(found, stores);
    refuse_other_drives(found, stores);
    refuse_difference(stores);
    resume(stores, outlook.commit, files, opened);
  }

  // The store's drives must be the ones that were named, in the store's order.
  void refuse_other_drives(const std::vector<std::size_t>& found,
                           const std::vector<InspectedStore>& stores) const {
    const auto& first = *stores.front().sound();
    const auto count = first.weights.size();
    std::vector<std::string> holders(count);  // directory of each of the store's drives
    std::string empty;
    for (std::size_t d = 0; d < options_.drives.size(); ++d) {
      const auto at = std::find(found.begin(), found.end(), d);
      const auto& directory = options_.drives[d].directory;
      if (at == found.end()) {
        empty = directory;
        continue;
      }
      const auto& superblock = *stores[static_cast<std::size_t>(at - found.begin())].sound();
      if (superblock.store != first.store || superblock.weights.size() != count) {
        refuse_drives(options_.drives[found.front()].directory + " and " + directory +
                      " hold drives of two stores; name the directories of one");
      }
      if (!holders[superblock.drive].empty()) {
        refuse_drives(holders[superblock.drive] + " and " + directory + " both hold drive " +
                      std::to_string(superblock.drive) + " of one store; name one of them");
      }
      holders[superblock.drive] = directory;
    }
    std::string order;
    bool ordered = true;
    for (std::size_t d = 0; d < count; ++d) {
      if (holders[d].empty()) {
        refuse_drives("drive " + std::to_string(d) + " of the store's " + std::to_string(count) +
                      (empty.empty() ? " was not named; name its directory too"
                                     : " is missing: " + empty +
                                           " holds no store; name the directory that does"));
      }
      order += " " + holders[d];
      ordered = ordered && holders[d] == options_.drives[d].directory;
    }
    if (!empty.empty()) {
      refuse_drives(empty + " holds none of its drives; name only" + order);
    }
    if (!ordered) refuse_drives("the store's drives have another order; name them as" + order);
  }

  [[noreturn]] void refuse_drives(const std::string& what) const {
    throw Error(ErrorCode::invalid_argument, "the store cannot be continued: " + what);
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
                      " of a run, committed " + time_text(newest->unix_time) +
                      "; continue it (--resume), discard it (--discard), or name another "
                      "directory");
    }
    throw Error(ErrorCode::unavailable, "a committed store is in the way");
  }

  void refuse_difference(const std::vector<InspectedStore>& stores) const {
    const auto& first = *stores.front().sound();
    std::string difference;
    std::string hashes;  // say something only where nothing else differs
    const auto differs = [&](const std::string& key, const std::string& there,
                             const std::string& here) {
      if (there == here) return;
      auto& text = key.ends_with("(hash)") ? hashes : difference;
      text += "\n  " + key + ": " + there + " there, " + here + " here";
    };
    const auto value = [](const StoreIdentity& identity, const std::string& key) {
      for (const auto& [name, text] : identity) {
        if (name == key) return text;
      }
      return std::string("(absent)");
    };
    for (const auto& [key, text] : options_.identity) {
      differs(key, value(first.identity, key), text);
    }
    for (const auto& [key, text] : first.identity) {
      if (value(options_.identity, key) == "(absent)") differs(key, text, "(absent)");
    }
    differs("checksums", first.checksums ? "on" : "off", options_.checksums ? "on" : "off");
    differs("bytes of a segment", segment_text(first.regions), segment_text(options_.durable));
    differs("layout of segments (hash)", layout_hash(first.regions),
            layout_hash(options_.durable));
    if (difference.empty()) difference = hashes;
    if (!difference.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  "the store in " + options_.drives.front().directory + " is of another run:" +
                      difference + "\nRepeat that run's settings, discard its store (--discard), "
                                   "or name another directory");
    }
  }

  static std::string segment_text(const std::vector<StoreRegion>& regions) {
    return std::to_string(regions.empty() ? 0 : regions.front().segment.count);
  }

  static std::string layout_hash(const std::vector<StoreRegion>& regions) {
    std::uint64_t hash = 0;
    for (const auto& region : regions) {
      const std::uint64_t parts[] = {hash, region.extent.offset.count, region.extent.size.count,
                                     region.segment.count, region.tile.count};
      hash = hash_bytes(parts, sizeof parts);
    }
    return std::to_string(hash);
  }

  void resume(std::vector<InspectedStore>& stores, const std::vector<std::size_t>& common,
              const std::vector<FileId>& files, OpenedStore& opened) const {
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
    for (std::size_t d = 0; d < stores.size(); ++d) {
      mend_superblock(d, stores[d], opened);
      note_unusable(d, stores[d], opened);
    }
  }

  // One copy is enough to go on, and two are needed to survive the next damage.
  void mend_superblock(std::size_t d, const InspectedStore& store, OpenedStore& opened) const {
    if (store.lost_spares > 0) {
      opened.notes.push_back(
          path(d) + " was cut short by " + std::to_string(store.lost_spares) + " of " +
          std::to_string(store.lost_spares + store.layout.spare_count) +
          " spares; they held nothing, and fewer are left for writes that fail");
    }
    const auto encoded = encode(*store.sound(), store.layout.text_bytes);
    BlockingIo io(io_, options_.patience);
    for (std::size_t i = 0; i < 2; ++i) {
      const auto& header = store.header[i].header;
      const bool another = i == 1 && store.header[0].header && header != store.header[0].header;
      if (header && !another && store.superblock[i].superblock) continue;
      const auto file = opened.files[d].file;
      std::string outcome = "it is written again";
      try {
        io.write(file, store.layout.text[i], encoded.text);
        io.flush(file);
        io.write(file, store.layout.header[i], encoded.header);
        io.flush(file);
      } catch (const Error& error) {
        if (io_.pending() > 0) throw;
        outcome = std::string("it stays so: ") + error.what();
      }
      opened.notes.push_back(path(d) + ": copy " + std::to_string(i) +
                             " of its superblock is damaged; " + outcome);
    }
  }

  // Newer commits, or what may have been some. One that a power cut kept from the other drives is
  // none.
  void note_unusable(std::size_t d, const InspectedStore& store, OpenedStore& opened) const {
    for (std::size_t i = 0; i < 2; ++i) {
      const auto& record = store.record[i];
      std::string what;
      if (!record.record && !record.blank) {
        what = "commit record " + std::to_string(i) + " is damaged: " + record.why_not;
      } else if (record.record && record.record->generation > opened.resumed->generation &&
                 !store.committed(i)) {
        what = "the commit of step " + std::to_string(record.record->step) +
               " is not whole: " + store.table_problem[i];
      }
      if (what.empty()) continue;
      opened.notes.push_back(path(d) + ": " + what + "; the run goes on at step " +
                             std::to_string(opened.resumed->step));
    }
  }

  // ---- a new store

  void make(OpenedStore& opened) const {
    std::vector<double> speeds;
    for (const auto& drive : options_.drives) speeds.push_back(drive.speed);
    opened.geometry = StoreGeometry(options_.durable, stripe_weights(speeds));
    for (std::size_t d = 0; d < options_.drives.size(); ++d) refuse_small(d, opened.geometry);
    remove(opened);
    std::random_device random;
    opened.id = (std::uint64_t{random()} << 32 | random()) >> 1;
    try {
      for (std::size_t d = 0; d < options_.drives.size(); ++d) make_file(d, opened);
    } catch (...) {
      unmake(io_, opened);
      throw;
    }
  }

  // Before what lies there is removed. What the file system refuses beyond that, it says later.
  void refuse_small(std::size_t d, const StoreGeometry& geometry) const {
    if (std::find(in_the_way_.begin(), in_the_way_.end(), d) == in_the_way_.end()) return;
    const auto& drive = options_.drives[d];
    std::error_code error;
    const Bytes free{std::filesystem::space(drive.directory, error).available};
    struct stat old {};
    if (error || ::stat(path(d).c_str(), &old) != 0) return;
    const Bytes room = free + Bytes{static_cast<std::uint64_t>(old.st_blocks) * 512};
    const auto layout = store_file_layout(geometry.shares()[d], geometry.regions().size());
    const StoreGeometry scratch(options_.scratch, geometry.weights());
    const Bytes need = layout.size + scratch.shares()[d].bytes + drive.keep_free;
    if (need <= room) return;
    throw Error(ErrorCode::out_of_budget,
                path(d) + " was to be replaced, and is kept: the new one needs " +
                    std::to_string(need.count) + " bytes, what is to be kept free included, and " +
                    std::to_string(room.count) + " would be there without it; missing " +
                    std::to_string((need - room).count) + " bytes");
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
    BlockingIo io(io_, options_.patience);
    // A header makes it a store: each is written when all before it is durable, so that a creation
    // cut short is known by its blank second header. What lay there before must not pass for a
    // record.
    const std::vector<std::byte> blank(kRecordBytes.count);
    for (const auto record : layout.record) io.write(file, record, blank);
    for (const auto text : layout.text) io.write(file, text, encoded.text);
    for (const auto header : layout.header) {
      io.write(file, header, std::vector<std::byte>(kStorePage.count));
    }
    io.flush(file);
    for (const auto header : layout.header) {
      io.write(file, header, encoded.header);
      io.flush(file);
    }
  }

  IoEngine& io_;
  const StoreOptions& options_;
  std::vector<std::size_t> in_the_way_;  // drives whose files must go before new ones are made
};

}  // namespace

std::string store_path(const std::string& directory) { return directory + "/terrace.store"; }

void unmake(IoEngine& io, const OpenedStore& opened) noexcept {
  for (const auto& file : opened.files) {
    if (io.pending() == 0) io.close(file.file);
    if (opened.resumed) continue;
    try {
      io.remove(file.path);
    } catch (const Error&) {
      // Without a commit it is known as left over.
    }
  }
}

OpenedStore open_store(IoEngine& io, const StoreOptions& options) {
  return Opener(io, options).open();
}

std::vector<std::string> discard_store(IoEngine& io, const StoreOptions& options) {
  TERRACE_CHECK(options.mode == StoreMode::discard);
  return Opener(io, options).discard().notes;
}

}  // namespace terrace
