#include "nvme/segment_store.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>

#include "nvme/checksum.h"

namespace terrace {
namespace {

constexpr int kMostAttempts = 3;  // of a write: in place, in a spare, in another spare
constexpr Nanoseconds kWatchPeriod = std::chrono::milliseconds(200);

std::vector<DriveSlots> durable_slots(const OpenedStore& opened) {
  std::vector<DriveSlots> slots;
  for (const auto& file : opened.files) {
    const auto& layout = file.layout;
    slots.push_back({{layout.slot[0], layout.slot[1]}, layout.spares, layout.spare_bytes,
                     layout.spare_count});
  }
  return slots;
}

// One place for each segment, no spares: what lies there can be made anew.
std::vector<DriveSlots> scratch_slots(const StoreGeometry& geometry) {
  return std::vector<DriveSlots>(geometry.shares().size(), DriveSlots{{Bytes{}}, {}, {}, 0});
}

std::vector<std::uint32_t> weights_of(const StoreOptions& options) {
  std::vector<double> speeds;
  for (const auto& drive : options.drives) speeds.push_back(drive.speed);
  if (speeds.empty()) return {1};  // nothing lives on NVMe
  return stripe_weights(speeds);
}

OpenedStore open_durable(IoEngine& io, const StoreOptions& options) {
  std::vector<std::string> directories;
  for (const auto& drive : options.drives) directories.push_back(drive.directory);
  refuse_one_directory_twice(directories);
  if (!options.durable.empty()) return open_store(io, options);
  OpenedStore opened{{}, {}, 0, 0, StoreGeometry({}, weights_of(options)), {}, {}, {}};
  if (options.mode == StoreMode::discard) opened.notes = discard_store(io, options);
  return opened;
}

}  // namespace

SegmentStore::SegmentStore(IoEngine& io, StoreOptions options)
    : io_(io),
      options_(std::move(options)),
      opened_(open_durable(io, options_)),
      scratch_geometry_(options_.scratch, weights_of(options_)),
      geometry_end_(opened_.geometry.end()),
      durable_(opened_.geometry, durable_slots(opened_)),
      scratch_(scratch_geometry_, scratch_slots(scratch_geometry_)),
      drives_(options_.drives.size()) {
  open_scratch();
  for (const auto& entries : opened_.entries) durable_.load(entries);
  for (const auto& file : opened_.files) {
    table_buffers_.emplace_back(file.layout.table_bytes);
    record_buffers_.emplace_back(kRecordBytes);
  }
}

void SegmentStore::open_scratch() {
  try {
    for (std::size_t d = 0; d < drives_.size(); ++d) {
      const Bytes size = scratch_geometry_.shares()[d].bytes;
      if (size.count == 0) continue;
      const auto& drive = options_.drives[d];
      drives_[d].scratch = io_.open({.path = drive.directory + "/terrace.scratch",
                                     .size = size,
                                     .mode = IoFileMode::scratch,
                                     .direct = true,
                                     .drive = static_cast<std::uint32_t>(d),
                                     .keep_free = drive.keep_free});
      drives_[d].has_scratch = true;
    }
  } catch (...) {
    for (const auto& drive : drives_) {
      if (drive.has_scratch) io_.close(drive.scratch);
    }
    unmake(io_, opened_);
    throw;
  }
}

SegmentStore::~SegmentStore() {
  for (const auto& drive : drives_) {
    if (drive.has_scratch) io_.close(drive.scratch);
  }
  for (const auto& store : opened_.files) io_.close(store.file);
}

const StoreGeometry& SegmentStore::geometry(Bytes address) const {
  return durable(address) ? opened_.geometry : scratch_geometry_;
}

FileId SegmentStore::file(Bytes address, std::uint32_t drive) const {
  return durable(address) ? opened_.files[drive].file : drives_[drive].scratch;
}

// ---- operations and their pieces

std::size_t SegmentStore::open_operation(Ticket ticket, IoOperation kind, Extent extent) {
  if (free_operations_.empty()) {
    free_operations_.push_back(operations_.size());
    operations_.emplace_back();
  }
  const auto index = free_operations_.back();
  free_operations_.pop_back();
  operations_[index] = {};
  operations_[index].ticket = ticket;
  operations_[index].kind = kind;
  operations_[index].extent = extent;
  ++open_operations_;
  return index;
}

void SegmentStore::add_piece(Piece piece) {
  if (free_pieces_.empty()) {
    free_pieces_.push_back(pieces_.size());
    pieces_.emplace_back();
  }
  const auto index = free_pieces_.back();
  free_pieces_.pop_back();
  piece.request.ticket = {index};
  ++operations_[piece.operation].pieces;
  auto& drive = drives_[piece.drive];
  if (drive.in_flight++ == 0) drive.progress = steady_clock().now();
  pieces_[index] = std::move(piece);
  drive.waiting.push_back(index);
}

std::size_t SegmentStore::submit(const StoreRequest& request) {
  const auto operation = open_operation(request.ticket, request.operation, request.extent);
  add_data_pieces(operation, request);
  return operation;
}

// Segments that follow one another in a file go together.
void SegmentStore::add_data_pieces(std::size_t operation, const StoreRequest& request) {
  const auto& where = geometry(request.extent.offset);
  const auto& segments = table(request.extent.offset);
  Piece piece;
  for (Bytes address = request.extent.offset; address < request.extent.end();) {
    const auto segment = where.segment_at(address);
    const auto whole = where.extent(segment);
    const auto& place = where.place(segment);
    const Bytes size = std::min(whole.end(), request.extent.end()) - address;
    std::uint64_t base = segments.current(segment);
    if (request.operation == IoOperation::write || address >= options_.transient) {
      base = segments.target(segment);
    }
    TERRACE_CHECK(base != SegmentTable::kNowhere);  // read before it was ever written
    const std::uint64_t offset = base + (address - whole.offset).count;
    if (piece.request.bytes > 0 && piece.drive == place.drive &&
        piece.request.offset + piece.request.bytes == offset) {
      piece.request.bytes += size.count;
      piece.extent.size += size;
    } else {
      if (piece.request.bytes > 0) add_piece(piece);
      piece.operation = operation;
      piece.drive = place.drive;
      piece.extent = {address, size};
      piece.request = {{}, request.operation, file(address, place.drive), offset,
                       request.memory + (address - request.extent.offset).count, size.count};
    }
    address += size;
  }
  if (piece.request.bytes > 0) add_piece(piece);
  if (operations_[operation].pieces == 0) close_operation(operation);
}

// What the engine cannot take yet waits.
void SegmentStore::pump() {
  for (auto& drive : drives_) {
    auto& waiting = drive.waiting;
    while (!waiting.empty() && io_.submit(pieces_[waiting.front()].request)) waiting.pop_front();
  }
}

void SegmentStore::flush() {
  pump();
  io_.flush();
}

std::size_t SegmentStore::reap(std::vector<StoreResult>& results, Nanoseconds timeout) {
  // 1. Hand over what waits.
  pump();
  // 2. Collect; an operation that hangs must not be slept over.
  completions_.clear();
  const Nanoseconds wait = results_.empty() ? timeout : Nanoseconds{0};
  const Nanoseconds watchful = std::min(kWatchPeriod, options_.patience / 4);
  io_.reap(completions_, open_operations_ > 0 ? std::min(wait, watchful) : wait);
  // 3. Account.
  for (const auto& completion : completions_) complete(completion);
  watch();
  // 4. What that made possible starts at once.
  flush();
  const auto count = results_.size();
  for (auto& result : results_) results.push_back(std::move(result));
  results_.clear();
  return count;
}

void SegmentStore::complete(const Completion& completion) {
  const auto index = static_cast<std::size_t>(completion.ticket.value);
  const Piece piece = pieces_[index];
  free_pieces_.push_back(index);
  auto& drive = drives_[piece.drive];
  --drive.in_flight;
  drive.progress = steady_clock().now();
  auto& operation = operations_[piece.operation];
  operation.start = std::min(operation.start, completion.start);
  operation.end = std::max(operation.end, completion.end);
  int error = completion.error;
  const bool moves = piece.request.operation != IoOperation::flush;
  if (error == 0 && moves && completion.bytes != piece.request.bytes) error = EIO;
  if (error == 0) {
    piece_done(piece);
  } else if (!retry(piece, error)) {
    fail(piece, error);
  }
  if (--operation.pieces == 0) close_operation(piece.operation);
}

void SegmentStore::piece_done(const Piece& piece) {
  auto& drive = drives_[piece.drive];
  const Bytes bytes{piece.request.operation == IoOperation::flush ? 0 : piece.request.bytes};
  if (piece.request.operation == IoOperation::read) drive.read += bytes;
  else drive.written += bytes;
  if (piece.purpose != Purpose::data || piece.request.operation != IoOperation::write ||
      piece.extent.offset >= options_.transient) {
    return;
  }
  const auto& where = geometry(piece.extent.offset);
  std::uint64_t offset = piece.request.offset;
  for (Bytes address = piece.extent.offset; address < piece.extent.end();) {
    const auto segment = where.segment_at(address);
    table(address).written(segment, offset);
    offset += where.place(segment).size.count;
    address += where.place(segment).size;
  }
}

// A failed write of several segments: each of them alone. Of one: once more in place where there
// are no spares, in a spare otherwise. The bytes are still in memory, and the committed copy is
// elsewhere: nothing is lost.
bool SegmentStore::retry(Piece piece, int error) {
  if (piece.purpose != Purpose::data || piece.request.operation != IoOperation::write ||
      ++piece.attempts > kMostAttempts) {
    return false;
  }
  if (piece.extent.offset >= options_.transient) {
    if (piece.attempts > 1) return false;
    add_piece(std::move(piece));
    return true;
  }
  const auto& segments = geometry(piece.extent.offset);
  const auto first = segments.segment_at(piece.extent.offset);
  if (segments.place(first).size == piece.extent.size) return move_to_spare(piece, first, error);
  Piece part = piece;
  for (Bytes done; done < piece.extent.size; done += part.extent.size) {
    const auto segment = segments.segment_at(piece.extent.offset + done);
    part.extent = {piece.extent.offset + done, segments.place(segment).size};
    part.request.offset = piece.request.offset + done.count;
    part.request.data = piece.request.data + done.count;
    part.request.bytes = part.extent.size.count;
    add_piece(part);
  }
  return true;
}

bool SegmentStore::move_to_spare(Piece piece, std::size_t segment, int error) {
  auto& segments = table(piece.extent.offset);
  if (segments.quarantine(segment, piece.request.offset)) {
    opened_.notes.push_back("writing " + where(piece.extent) + " to offset " +
                            std::to_string(piece.request.offset) + " of " +
                            io_.file_info(piece.request.file).path + " failed (" +
                            std::strerror(error) + "): the place is used no more");
    piece.request.offset = segments.target(segment);
  } else if (durable(piece.extent.offset) || piece.attempts > 1) {
    return false;
  }
  add_piece(std::move(piece));
  return true;
}

void SegmentStore::fail(const Piece& piece, int error) {
  auto& operation = operations_[piece.operation];
  if (operation.error != 0) return;
  operation.error = error;
  const auto kind = piece.request.operation;
  const char* what = kind == IoOperation::read    ? "reading "
                     : kind == IoOperation::write ? "writing "
                                                  : "flushing ";
  operation.message = what;
  if (piece.purpose == Purpose::data) {
    operation.message += where(piece.extent);
  } else {
    operation.message += "the commit of step " + std::to_string(commit_->step);
  }
  operation.message += ": " + std::to_string(piece.request.bytes) + " bytes at offset " +
                       std::to_string(piece.request.offset) + " of " +
                       io_.file_info(piece.request.file).path + " on drive " +
                       std::to_string(piece.drive) + " (" +
                       options_.drives[piece.drive].directory + ") failed: " +
                       std::strerror(error) + "; " + transfer_remedy(error);
  if (piece.purpose != Purpose::data) {
    operation.message += ". This step or the last one committed counts: continue with --resume";
  }
}

void SegmentStore::close_operation(std::size_t index) {
  auto& operation = operations_[index];
  if (commit_ && commit_->operation == index && operation.error == 0 &&
      commit_->stage != Purpose::record_flush) {
    return next_stage();
  }
  if (commit_ && commit_->operation == index) {
    if (operation.error == 0) {
      durable_.commit();
      ++opened_.generation;
      for (auto& file : opened_.files) file.active = 1 - file.active;
    } else {
      broken_.emplace(ErrorCode::io, operation.message);
    }
    commit_.reset();
  }
  const auto now = steady_clock().now();
  operation.start = std::min(operation.start, now);
  operation.end = std::max(operation.end, operation.start);
  if (!operation.abandoned) {
    results_.push_back({{operation.ticket, operation.error,
                         operation.error == 0 ? operation.extent.size.count : 0,
                         operation.start, operation.end},
                        std::move(operation.message)});
  }
  --open_operations_;
  free_operations_.push_back(index);
}

// Names an operation that hangs: the oldest piece of a drive that has completed nothing for long.
void SegmentStore::watch() {
  if (stuck_) return;
  const auto now = steady_clock().now();
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    if (drives_[d].in_flight == 0 || now - drives_[d].progress < options_.patience) continue;
    std::vector<bool> idle(pieces_.size());
    for (const auto index : free_pieces_) idle[index] = true;
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      if (idle[i] || pieces_[i].drive != d) continue;
      fail(pieces_[i], ETIMEDOUT);
      stuck_ = Error(ErrorCode::io, operations_[pieces_[i].operation].message +
                                        ". It makes no progress: nothing there has ended for " +
                                        seconds_text(options_.patience) +
                                        "; continue with --resume when the drive answers");
      return;
    }
  }
}

// ---- blocking

StoreResult SegmentStore::run_now(std::size_t operation) {
  std::vector<StoreResult> results;
  while (results.empty()) {
    reap(results, std::chrono::milliseconds(100));
    if (!results.empty() || !stuck_) continue;
    operations_[operation].abandoned = true;  // nobody asks for its result any more
    throw *stuck_;
  }
  if (results.front().completion.error != 0) throw Error(ErrorCode::io, results.front().error);
  return results.front();
}

void SegmentStore::read_now(Extent extent, std::span<std::byte> memory) {
  run_now(submit({Ticket{}, IoOperation::read, extent, memory.data()}));
  const auto wrong = mismatch(extent, hash(extent, memory));
  if (!wrong.empty()) throw Error(ErrorCode::corrupt, wrong);
}

void SegmentStore::write_now(Extent extent, std::span<std::byte> memory,
                             std::uint64_t generation) {
  stage(extent, generation, hash(extent, memory));
  run_now(submit({Ticket{}, IoOperation::write, extent, memory.data()}));
}

void SegmentStore::commit_now(std::uint64_t step, std::string trainer) {
  run_now(commit(Ticket{}, step, std::move(trainer)));
}

std::vector<DriveStats> SegmentStore::stats() const {
  std::vector<DriveStats> result;
  for (std::size_t d = 0; d < drives_.size(); ++d) {
    DriveStats stats{{}, drives_[d].read, drives_[d].written, {}, false, "nothing lives on nvme"};
    const auto add = [&](FileId file) {
      const auto info = io_.file_info(file);
      if (stats.path.empty()) stats.path = info.path;
      stats.reserved += info.size;
      stats.direct = info.direct;
      stats.direct_note = info.direct_note;
    };
    if (!opened_.files.empty()) add(opened_.files[d].file);
    if (drives_[d].has_scratch) add(drives_[d].scratch);
    result.push_back(stats);
  }
  return result;
}

}  // namespace terrace
