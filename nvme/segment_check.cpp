#include "nvme/segment_check.h"

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "nvme/checksum.h"
#include "nvme/page_buffer.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr Bytes kPiece = 4_MiB;         // read at a time
constexpr std::size_t kInFlight = 4;    // pieces of each drive
constexpr Nanoseconds kPatience = std::chrono::seconds(60);  // without any progress

// Where a segment lies, of either commit or of both.
struct Copy {
  TableEntry entry;
  bool newest = false;
  bool older = false;
};

std::vector<Copy> copies_of(const FoundStore& found, std::size_t drive) {
  const auto& store = found.drives[drive].store;
  const auto newest = found.outlook.commit[drive];
  std::vector<Copy> copies;
  for (const auto& entry : store.table[newest]) copies.push_back({entry, true, false});
  if (const auto older = found.older(drive)) {
    const auto& entries = store.table[*older];
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (entries[i] == copies[i].entry) copies[i].older = true;
      else copies.push_back({entries[i], false, true});
    }
  }
  std::stable_sort(copies.begin(), copies.end(), [](const auto& a, const auto& b) {
    return a.entry.offset < b.entry.offset;
  });
  return copies;
}

// Counts what the copies are found to be.
class Tally {
 public:
  Tally(const FoundStore& found, const StoreGeometry& geometry, StoreCheck& check)
      : found_(found), geometry_(geometry), check_(check) {}

  Bytes tile(const Copy& copy) const { return region(copy).tile; }

  void hashed(std::size_t drive, const Copy& copy, std::span<const std::uint64_t> tiles) {
    const auto& entry = copy.entry;
    const SegmentClaim claim{found_.superblock()->store, entry.segment, entry.generation,
                             entry.length};
    const auto checksum = segment_checksum(claim, tiles);
    if (checksum != entry.checksum) return wrong(drive, copy, checksum, "");
    if (copy.newest) ++check_.sound;
    if (copy.older) ++check_.older_sound;
  }

  // `refusal`: why it cannot be read; "": it can.
  void wrong(std::size_t drive, const Copy& copy, std::uint64_t checksum,
             const std::string& refusal) {
    if (!copy.newest) return;
    const auto& entry = copy.entry;
    StoreDamage damage{StorePlace::segment, drive, 0, {{entry.offset}, {entry.length}}, refusal};
    damage.unreadable = !refusal.empty();
    if (refusal.empty()) damage.why = "its checksum is wrong";
    damage.segment = entry.segment;
    damage.region = region(copy).name;
    damage.generation = entry.generation;
    damage.expected = entry.checksum;
    damage.found = checksum;
    add_damage(check_, std::move(damage));
  }

 private:
  const StoreRegion& region(const Copy& copy) const {
    return geometry_.regions()[geometry_.region_of(copy.entry.segment)];
  }

  const FoundStore& found_;
  const StoreGeometry& geometry_;
  StoreCheck& check_;
};

// Goes over one drive's copies in the order of their offsets, several pieces ahead of the hashing.
class DriveReader {
 public:
  DriveReader(IoEngine& io, const FoundStore& found, std::size_t drive, Tally& tally)
      : io_(io),
        file_(found.drives[drive].file),
        drive_(drive),
        copies_(copies_of(found, drive)),
        tally_(tally) {
    for (auto& slot : slots_) slot.memory = PageBuffer(kPiece);
  }

  Bytes total() const {
    Bytes sum;
    for (const auto& copy : copies_) sum += Bytes{copy.entry.length};
    return sum;
  }
  bool done() const { return hashing_.copy == copies_.size(); }

  // Fills the free slots as far as the engine takes it.
  void issue() {
    while (issued_ - taken_ < kInFlight && reading_.copy < copies_.size()) {
      auto next = reading_;
      Slot& slot = slots_[issued_ % kInFlight];
      slot.extent = take_piece(next);
      slot.complete = false;
      const Ticket ticket{drive_ * kInFlight + issued_ % kInFlight};
      if (!io_.submit({ticket, IoOperation::read, file_, slot.extent.offset.count,
                       slot.memory.data(), slot.extent.size.count})) {
        return;
      }
      reading_ = next;
      ++issued_;
    }
  }

  void complete(std::size_t slot, const Completion& completion) {
    slots_[slot].complete = true;
    slots_[slot].failed =
        completion.error != 0 || completion.bytes != slots_[slot].extent.size.count;
  }

  // Hashes what is there, in order; returns the bytes.
  Bytes hash() {
    Bytes done;
    while (taken_ < issued_ && slots_[taken_ % kInFlight].complete) {
      const Slot& slot = slots_[taken_ % kInFlight];
      for (Bytes used; used < slot.extent.size;) {
        used += hash_part(slot.memory.span().subspan(used.count, (slot.extent.size - used).count),
                          slot.failed);
      }
      done += slot.extent.size;
      ++taken_;
    }
    return done;
  }

  // Once nothing is in flight: what could not be read with its neighbours is read alone.
  void read_failed() {
    BlockingIo io(io_);
    for (const auto index : failed_) {
      const Copy& copy = copies_[index];
      TileHasher hasher(tally_.tile(copy));
      try {
        for (Bytes done; done.count < copy.entry.length;) {
          const auto part = slots_[0].memory.span().first(
              std::min(kPiece, Bytes{copy.entry.length} - done).count);
          io.read(file_, Bytes{copy.entry.offset} + done, part);
          hasher.add(part);
          done += Bytes{part.size()};
        }
        tally_.hashed(drive_, copy, hasher.finish());
      } catch (const Error& error) {
        tally_.wrong(drive_, copy, 0, error.what());
      }
    }
  }

 private:
  struct Position {
    std::size_t copy = 0;
    Bytes inside;
  };
  struct Slot {
    PageBuffer memory;
    Extent extent;
    bool complete = false;
    bool failed = false;
  };

  // The next piece: copies that lie back to back go together.
  Extent take_piece(Position& at) const {
    Extent piece{Bytes{copies_[at.copy].entry.offset} + at.inside, {}};
    while (piece.size < kPiece && at.copy < copies_.size()) {
      const auto& entry = copies_[at.copy].entry;
      if (Bytes{entry.offset} + at.inside != piece.end()) break;
      const Bytes part = std::min(kPiece - piece.size, Bytes{entry.length} - at.inside);
      piece.size += part;
      at.inside += part;
      if (at.inside.count < entry.length) break;
      at = {at.copy + 1, {}};
    }
    return piece;
  }

  // Of one copy, from the front of `bytes`; returns how many there were.
  Bytes hash_part(std::span<const std::byte> bytes, bool failed) {
    const Copy& copy = copies_[hashing_.copy];
    const Bytes part = std::min(Bytes{bytes.size()}, Bytes{copy.entry.length} - hashing_.inside);
    if (!hasher_) hasher_.emplace(tally_.tile(copy));
    if (!failed) hasher_->add(bytes.first(part.count));
    copy_failed_ = copy_failed_ || failed;
    hashing_.inside += part;
    if (hashing_.inside.count < copy.entry.length) return part;
    const auto tiles = hasher_->finish();
    if (copy_failed_) failed_.push_back(hashing_.copy);
    else tally_.hashed(drive_, copy, tiles);
    hasher_.reset();
    copy_failed_ = false;
    hashing_ = {hashing_.copy + 1, {}};
    return part;
  }

  IoEngine& io_;
  const FileId file_;
  const std::size_t drive_;
  const std::vector<Copy> copies_;
  Tally& tally_;
  std::array<Slot, kInFlight> slots_;
  std::uint64_t issued_ = 0;  // pieces
  std::uint64_t taken_ = 0;   // of them, hashed
  Position reading_;
  Position hashing_;
  std::optional<TileHasher> hasher_;  // of the copy at hashing_
  bool copy_failed_ = false;
  std::vector<std::size_t> failed_;
};

// All drives at once.
void read_all(IoEngine& io, std::deque<DriveReader>& readers, const CheckProgress& progress,
              StoreCheck& check) {
  Bytes total;
  for (const auto& reader : readers) total += reader.total();
  std::vector<Completion> completions;
  auto last = steady_clock().now();
  const auto open = [](const DriveReader& reader) { return !reader.done(); };
  while (std::any_of(readers.begin(), readers.end(), open)) {
    // 1. Keep the drives busy.
    for (auto& reader : readers) reader.issue();
    io.flush();
    // 2. Collect.
    completions.clear();
    io.reap(completions, std::chrono::milliseconds(100));
    for (const auto& completion : completions) {
      readers[completion.ticket.value / kInFlight].complete(completion.ticket.value % kInFlight,
                                                            completion);
    }
    // 3. Hash what came.
    for (auto& reader : readers) check.read += reader.hash();
    if (progress && !completions.empty()) progress(check.read, total);
    // 4. A drive that hangs must not be waited for.
    const auto now = steady_clock().now();
    if (!completions.empty()) last = now;
    if (now - last > kPatience) {
      throw Error(ErrorCode::io, "reading the store makes no progress for " +
                                     seconds_text(kPatience) + "; see the kernel's log");
    }
  }
  for (auto& reader : readers) reader.read_failed();
}

}  // namespace

void add_damage(StoreCheck& check, StoreDamage damage) {
  ++check.damaged;
  if (damage.unreadable) ++check.unreadable;
  if (check.damages.size() < kMostDamages) check.damages.push_back(std::move(damage));
}

void check_segments(IoEngine& io, const FoundStore& store, const CheckProgress& progress,
                    StoreCheck& check) {
  const auto* superblock = store.superblock();
  if (superblock == nullptr) return;
  check.checksums = superblock->checksums;
  if (store.outlook.commit.empty()) return;
  for (std::size_t d = 0; d < store.drives.size(); ++d) {
    const auto& drive = store.drives[d].store;
    check.segments += drive.table[store.outlook.commit[d]].size();
    if (const auto older = store.older(d)) check.older_segments += drive.table[*older].size();
  }
  if (!check.checksums) return;
  const StoreGeometry geometry(superblock->regions, superblock->weights);
  Tally tally(store, geometry, check);
  auto readers = std::make_unique<std::deque<DriveReader>>();
  for (std::size_t d = 0; d < store.drives.size(); ++d) readers->emplace_back(io, store, d, tally);
  try {
    read_all(io, *readers, progress, check);
  } catch (...) {
    // What is in flight may still be written to this memory: it is never freed.
    if (io.pending() > 0) [[maybe_unused]] const auto* left = readers.release();
    throw;
  }
}

}  // namespace terrace
