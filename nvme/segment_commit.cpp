// The other half of SegmentStore: checksums and commits.
//
// A commit writes each drive's table and the trainer's bytes, flushes all drives (what the commit
// speaks of is durable now), writes each drive's record, and flushes again. Until the last record
// is durable the commit before it holds; its copies, table and record are not touched.
#include <algorithm>
#include <cstring>
#include <ctime>

#include "nvme/checksum.h"
#include "nvme/segment_store.h"

namespace terrace {
namespace {

constexpr std::uint64_t kScratchMark = std::uint64_t{1} << 62;    // of claims that no store repeats
constexpr std::uint64_t kTransientMark = std::uint64_t{1} << 63;

}  // namespace

// ---- checksums

SegmentClaim SegmentStore::claim(std::size_t segment, Bytes address, Bytes size,
                                 std::uint64_t generation) const {
  if (address >= options_.transient) {
    return {opened_.id, kTransientMark | address.count, generation, size.count};
  }
  const std::uint64_t mark = durable(address) ? 0 : kScratchMark;
  return {opened_.id, mark | segment, generation, size.count};
}

Bytes SegmentStore::tile(Bytes address) const {
  if (address >= options_.transient) return options_.transient_tile;
  const auto& where = geometry(address);
  return where.regions()[where.region_of(where.segment_at(address))].tile;
}

// Calls visit(segment, its extent, its tiles); in the transient part an extent is one segment.
template <class Visit>
void SegmentStore::for_each_segment(Extent extent, std::span<const std::uint64_t> tiles,
                                    Visit&& visit) const {
  const bool transient = extent.offset >= options_.transient;
  const auto& where = geometry(extent.offset);
  std::size_t used = 0;
  for (Bytes address = extent.offset; address < extent.end();) {
    const auto segment = transient ? 0 : where.segment_at(address);
    const Extent part = transient ? extent : where.extent(segment);
    TERRACE_CHECK(part.offset == address && part.end() <= extent.end());
    const auto count = tile_count(part.size, tile(part.offset));
    visit(segment, part, tiles.empty() ? tiles : tiles.subspan(used, count));
    used += count;
    address = part.end();
  }
}

std::size_t SegmentStore::tiles(Extent extent) const {
  std::size_t count = 0;
  for_each_segment(extent, {}, [&](std::size_t, Extent part, auto) {
    count += tile_count(part.size, tile(part.offset));
  });
  return count;
}

std::vector<std::uint64_t> SegmentStore::hash(Extent extent,
                                              std::span<const std::byte> memory) const {
  std::vector<std::uint64_t> all;
  if (!options_.checksums) return all;
  for_each_segment(extent, {}, [&](std::size_t, Extent part, auto) {
    const auto bytes = memory.subspan((part.offset - extent.offset).count, part.size.count);
    const auto hashes = hash_tiles(bytes, tile(part.offset));
    all.insert(all.end(), hashes.begin(), hashes.end());
  });
  return all;
}

void SegmentStore::stage(Extent extent, std::uint64_t generation,
                         std::span<const std::uint64_t> tiles) {
  for_each_segment(extent, tiles, [&](std::size_t segment, Extent part, auto hashes) {
    const std::uint64_t checksum =
        options_.checksums
            ? segment_checksum(claim(segment, part.offset, part.size, generation), hashes)
            : 0;
    if (part.offset < options_.transient) {
      return table(part.offset).stage(segment, checksum, generation);
    }
    const auto after = transient_.lower_bound(part.offset);
    transient_.erase(after, transient_.lower_bound(part.end()));
    transient_[part.offset] = {part.size, checksum, generation};
  });
}

std::string SegmentStore::mismatch(Extent extent, std::span<const std::uint64_t> tiles) const {
  std::string wrong;
  if (!options_.checksums) return wrong;
  for_each_segment(extent, tiles, [&](std::size_t segment, Extent part, auto hashes) {
    if (!wrong.empty()) return;
    std::uint64_t expected = 0;
    std::uint64_t generation = 0;
    std::string place;
    if (part.offset < options_.transient) {
      const auto& segments = table(part.offset);
      expected = segments.checksum(segment);
      generation = segments.generation(segment);
      const auto drive = geometry(part.offset).place(segment).drive;
      place = " at offset " + std::to_string(segments.current(segment)) + " of " +
              io_.file_info(file(part.offset, drive)).path;
    } else if (const auto sum = transient_.find(part.offset); sum != transient_.end()) {
      expected = sum->second.checksum;
      generation = sum->second.generation;
      place = " in the scratch files";
    }
    const auto found =
        segment_checksum(claim(segment, part.offset, part.size, generation), hashes);
    if (found == expected) return;
    wrong = where(part) + ", " + std::to_string(part.size.count) + " bytes" + place +
            ", is not what step " + std::to_string(generation) + " wrote: checksum " +
            std::to_string(expected) + " is expected, " + std::to_string(found) +
            " found. The drive or the way to it is at fault; see `terrace store verify`";
  });
  return wrong;
}

std::string SegmentStore::where(Extent extent) const {
  if (options_.describe) return options_.describe(extent);
  return "addresses [" + std::to_string(extent.offset.count) + ", " +
         std::to_string(extent.end().count) + ")";
}

// ---- commits

std::size_t SegmentStore::commit(Ticket ticket, std::uint64_t step, std::string trainer) {
  TERRACE_CHECK(!commit_ && !opened_.files.empty());
  if (trainer.size() > most_trainer_bytes()) {
    throw Error(ErrorCode::invalid_argument,
                "the trainer gives " + std::to_string(trainer.size()) +
                    " bytes to keep with a commit; at most " +
                    std::to_string(most_trainer_bytes()) + " are kept: keep more elsewhere");
  }
  commit_ = Commit{open_operation(ticket, IoOperation::write, {}), step, std::move(trainer),
                   Purpose::table, {}};
  begin_stage();
  return commit_->operation;
}

void SegmentStore::revert() {
  TERRACE_CHECK(pending() == 0 && !commit_);
  durable_.revert();
}

void SegmentStore::begin_stage() {
  switch (commit_->stage) {
    case Purpose::table: return write_tables();
    case Purpose::record: return write_records();
    default:
      for (std::uint32_t d = 0; d < drives_.size(); ++d) {
        add_metadata(d, IoOperation::flush, {}, {});
      }
  }
}

void SegmentStore::next_stage() {
  commit_->stage = static_cast<Purpose>(static_cast<int>(commit_->stage) + 1);
  begin_stage();
}

void SegmentStore::add_metadata(std::uint32_t drive, IoOperation kind, Bytes offset,
                                std::span<std::byte> memory) {
  Piece piece;
  piece.operation = commit_->operation;
  piece.purpose = commit_->stage;
  piece.drive = drive;
  piece.request = {{}, kind, opened_.files[drive].file, offset.count, memory.data(), memory.size()};
  operations_[piece.operation].extent.size += Bytes{memory.size()};
  add_piece(piece);
}

void SegmentStore::write_tables() {
  for (std::uint32_t d = 0; d < drives_.size(); ++d) {
    const auto& file = opened_.files[d];
    const auto entries = durable_.entries(d);
    const auto& buffer = table_buffers_[d];
    const std::size_t bytes = entries.size() * sizeof(TableEntry);
    commit_->table_checksums.push_back(hash_bytes(entries.data(), bytes));
    if (bytes > 0) {  // of five drives some may hold nothing
      std::memcpy(buffer.data(), entries.data(), bytes);
      add_metadata(d, IoOperation::write, file.layout.table[1 - file.active], buffer.span());
    }
    write_trainer(d);
  }
}

// Behind the page that will speak of it.
void SegmentStore::write_trainer(std::uint32_t drive) {
  const auto& trainer = commit_->trainer;
  if (trainer.empty()) return;
  const auto& file = opened_.files[drive];
  const auto pages = record_buffers_[drive].span().subspan(
      kStorePage.count, round_up(Bytes{trainer.size()}, kStorePage).count);
  std::memset(pages.data(), 0, pages.size());
  std::memcpy(pages.data(), trainer.data(), trainer.size());
  add_metadata(drive, IoOperation::write, file.layout.record[1 - file.active] + kStorePage, pages);
}

void SegmentStore::write_records() {
  for (std::uint32_t d = 0; d < drives_.size(); ++d) {
    const auto& file = opened_.files[d];
    CommitRecord record;
    record.store = opened_.id;
    record.generation = opened_.generation + 1;
    record.step = commit_->step;
    record.table_checksum = commit_->table_checksums[d];
    record.segments = opened_.geometry.shares()[d].segments;
    record.bytes_written = file.bytes_written + drives_[d].written.count;
    record.unix_time = static_cast<std::int64_t>(std::time(nullptr));
    record.drive = d;
    record.table = static_cast<std::uint32_t>(1 - file.active);
    record.trainer = commit_->trainer;
    const auto bytes = encode(record);
    const auto page = record_buffers_[d].span().first(kStorePage.count);
    std::memcpy(page.data(), bytes.data(), page.size());
    add_metadata(d, IoOperation::write, file.layout.record[1 - file.active], page);
  }
}

}  // namespace terrace
