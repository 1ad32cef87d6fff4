#include "nvme/store_format.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <ctime>
#include <string_view>

#include "nvme/checksum.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::uint64_t kSuperblockMagic = 0x31'45'43'41'52'52'45'54;  // "TERRACE1"
constexpr std::uint64_t kRecordMagic = 0x31'54'49'4d'4d'4f'43'54;      // "TCOMMIT1"
constexpr std::size_t kMaxRegionName = 150;

struct Envelope {
  std::uint64_t magic = 0;
  std::uint64_t checksum = 0;  // over everything behind it, up to `bytes`
  std::uint64_t bytes = 0;     // of the whole, envelope included
};
constexpr std::size_t kChecked = offsetof(Envelope, bytes);

// Behind the envelope of a header page.
struct HeaderFields {
  std::uint64_t text_bytes, text_used, text_checksum;
};
constexpr std::size_t kHeaderBytes = sizeof(Envelope) + sizeof(HeaderFields);
constexpr Bytes kMostText = 64_MiB;

// Of a record, behind the envelope.
struct RecordFields {
  std::uint64_t store, generation, step, table_checksum, segments, bytes_written;
  std::int64_t unix_time;
  std::uint32_t drive, table;
  std::uint64_t trainer_bytes, trainer_checksum;
};
constexpr std::size_t kRecordHead = sizeof(Envelope) + sizeof(RecordFields);
constexpr std::size_t kSector = 512;  // the least that a drive writes as a whole
static_assert(kRecordHead <= kSector);

void seal(std::vector<std::byte>& bytes, std::uint64_t magic, std::size_t used) {
  Envelope envelope{magic, 0, used};
  std::memcpy(bytes.data(), &envelope, sizeof envelope);
  envelope.checksum = hash_bytes(bytes.data() + kChecked, used - kChecked);
  std::memcpy(bytes.data(), &envelope, sizeof envelope);
}

// Whether it holds `size` bytes, envelope included, as they were sealed.
bool open_envelope(std::span<const std::byte> bytes, std::uint64_t magic, std::size_t size,
                   std::string& why_not) {
  Envelope envelope;
  if (bytes.size() < sizeof envelope) {
    why_not = "it is cut short";
    return false;
  }
  std::memcpy(&envelope, bytes.data(), sizeof envelope);
  if (envelope.magic != magic) {
    why_not = "it does not begin as one";
  } else if (envelope.bytes != size || size > bytes.size()) {
    why_not = "its length is impossible";
  } else if (hash_bytes(bytes.data() + kChecked, size - kChecked) != envelope.checksum) {
    why_not = "its checksum is wrong";
  } else {
    return true;
  }
  return false;
}

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{}; });
}

// ---- the superblock's text: "key=value" lines

std::string one_line(std::string text) {
  for (auto& c : text) {
    if (c == '\n' || c == '\r' || c == '\0') c = ' ';
  }
  return text;
}

std::string joined(const std::vector<std::uint32_t>& values) {
  std::string text;
  for (const auto value : values) text += (text.empty() ? "" : ",") + std::to_string(value);
  return text;
}

std::string identity_text(const StoreIdentity& identity) {
  std::string text;
  for (const auto& [key, value] : identity) {
    text.append("identity.").append(key).append("=").append(value) += '\n';
  }
  return text;
}

// Why it would not come back as it is, or "".
std::string identity_problem(const StoreIdentity& identity) {
  for (const auto& [key, value] : identity) {
    if (one_line(key) == key && one_line(value) == value && key.find('=') == key.npos) continue;
    return "is kept as lines of key=value: '" + one_line(key) +
           "' has a line end, or a '=' in its key; write it in other words";
  }
  if (identity_text(identity).size() <= kIdentityBytes.count) return "";
  return "has more than " + std::to_string(kIdentityBytes.count) +
         " bytes; give the trainer's part as a hash";
}

std::string superblock_text(const Superblock& superblock) {
  std::string text = "store=" + std::to_string(superblock.store) +
                     "\ndrive=" + std::to_string(superblock.drive) +
                     "\nweights=" + joined(superblock.weights) +
                     "\nchecksums=" + std::to_string(superblock.checksums ? 1 : 0) + '\n';
  text += identity_text(superblock.identity);
  for (const auto& region : superblock.regions) {
    text += "region=" + std::to_string(region.extent.offset.count) + ',' +
            std::to_string(region.extent.size.count) + ',' +
            std::to_string(region.segment.count) + ',' +
            std::to_string(region.tile.count) + ',' +
            one_line(region.name.substr(0, kMaxRegionName)) + '\n';
  }
  return text;
}

// Thrown inside decode_superblock().
struct Malformed {
  std::string why;
};

// Takes a number up to `end` (or the end of the text) off the front.
std::uint64_t take_number(std::string_view& text, char end) {
  std::uint64_t value = 0;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const auto used = static_cast<std::size_t>(rest - text.data());
  const bool ends = used == text.size() || text[used] == end;
  if (error != std::errc{} || used == 0 || !ends) throw Malformed{"a number is malformed"};
  text.remove_prefix(std::min(text.size(), used + 1));
  return value;
}

std::uint64_t only_number(std::string_view text) {
  const auto value = take_number(text, '\n');
  if (!text.empty()) throw Malformed{"a number is followed by something"};
  return value;
}

StoreRegion parse_region(std::string_view text) {
  StoreRegion region;
  region.extent.offset = {take_number(text, ',')};
  region.extent.size = {take_number(text, ',')};
  region.segment = {take_number(text, ',')};
  region.tile = {take_number(text, ',')};
  region.name = text;
  return region;
}

void parse_line(std::string_view key, std::string_view value, Superblock& result) {
  if (key == "store") {
    result.store = only_number(value);
  } else if (key == "drive") {
    result.drive = static_cast<std::uint32_t>(only_number(value));
  } else if (key == "weights") {
    while (!value.empty()) {
      result.weights.push_back(static_cast<std::uint32_t>(take_number(value, ',')));
    }
  } else if (key == "checksums") {
    result.checksums = only_number(value) != 0;
  } else if (key == "region") {
    result.regions.push_back(parse_region(value));
  } else if (key.starts_with("identity.")) {
    result.identity.emplace_back(key.substr(9), value);
  } else {
    throw Malformed{"a line is unknown"};
  }
}

void check_regions(const Superblock& superblock) {
  constexpr std::uint64_t kMost = std::uint64_t{1} << 56;
  std::uint64_t end = 0;
  std::uint64_t segments = 0;
  for (const auto& region : superblock.regions) {
    const auto [offset, size] = region.extent;
    const bool sane = offset.count == end && size.count > 0 && size.count < kMost - end &&
                      region.segment.count > 0 && region.tile.count > 0 &&
                      size.count % kStorePage.count == 0 &&
                      region.segment.count % kStorePage.count == 0 &&
                      region.segment.count <= (std::uint64_t{1} << 32) - kStorePage.count;
    if (!sane) throw Malformed{"a region is impossible"};
    end += size.count;
    segments += (size.count + region.segment.count - 1) / region.segment.count;
  }
  if (segments >= std::uint64_t{1} << 32) throw Malformed{"there are too many segments"};
}

void check_superblock(const Superblock& superblock) {
  const auto& weights = superblock.weights;
  const bool sane = !weights.empty() && weights.size() <= 64 &&
                    superblock.drive < weights.size() &&
                    std::all_of(weights.begin(), weights.end(),
                                [](auto weight) { return weight > 0 && weight <= 1000000; });
  if (!sane) throw Malformed{"its drives are impossible"};
  if (const auto problem = identity_problem(superblock.identity); !problem.empty()) {
    throw Malformed{"its identity " + problem};
  }
  check_regions(superblock);
}

Superblock parse_superblock(std::string_view text) {
  const auto whole = text;
  Superblock result;
  while (!text.empty()) {
    const auto end = text.find('\n');
    if (end == text.npos) throw Malformed{"its last line does not end"};
    const auto line = text.substr(0, end);
    const auto equals = line.find('=');
    if (equals == line.npos) throw Malformed{"a line has no value"};
    parse_line(line.substr(0, equals), line.substr(equals + 1), result);
    text.remove_prefix(end + 1);
  }
  check_superblock(result);
  // Each number in its place, in its range, once.
  if (superblock_text(result) != whole) throw Malformed{"it is not as it would be written"};
  return result;
}

}  // namespace

EncodedSuperblock encode(const Superblock& superblock, Bytes text_bytes) {
  if (const auto problem = identity_problem(superblock.identity); !problem.empty()) {
    throw Error(ErrorCode::invalid_argument, "the store's identity " + problem);
  }
  const auto text = superblock_text(superblock);
  TERRACE_CHECK(text.size() <= text_bytes.count);
  EncodedSuperblock encoded{std::vector<std::byte>(kStorePage.count),
                            std::vector<std::byte>(text_bytes.count)};
  std::memcpy(encoded.text.data(), text.data(), text.size());
  const HeaderFields fields{text_bytes.count, text.size(), hash_bytes(text.data(), text.size())};
  std::memcpy(encoded.header.data() + sizeof(Envelope), &fields, sizeof fields);
  seal(encoded.header, kSuperblockMagic, kHeaderBytes);
  return encoded;
}

DecodedHeader decode_header(std::span<const std::byte> page) {
  DecodedHeader decoded;
  decoded.blank = all_zero(page);
  if (!open_envelope(page, kSuperblockMagic, kHeaderBytes, decoded.why_not)) return decoded;
  HeaderFields fields{};
  std::memcpy(&fields, page.data() + sizeof(Envelope), sizeof fields);
  if (fields.text_bytes % kStorePage.count != 0 || fields.text_bytes > kMostText.count ||
      fields.text_used > fields.text_bytes) {
    decoded.why_not = "its lengths are impossible";
    return decoded;
  }
  decoded.header = {{fields.text_bytes}, fields.text_used, fields.text_checksum};
  return decoded;
}

DecodedSuperblock decode_superblock(const SuperblockHeader& header,
                                    std::span<const std::byte> bytes) {
  DecodedSuperblock decoded;
  if (header.text_used > bytes.size() ||
      hash_bytes(bytes.data(), header.text_used) != header.text_checksum) {
    decoded.why_not = "its checksum is wrong";
    return decoded;
  }
  try {
    decoded.superblock =
        parse_superblock({reinterpret_cast<const char*>(bytes.data()), header.text_used});
  } catch (const Malformed& malformed) {
    decoded.why_not = malformed.why;
  }
  return decoded;
}

std::string time_text(std::int64_t unix_time) {
  const auto time = static_cast<std::time_t>(unix_time);
  std::tm utc{};
  char text[40] = "";
  if (::gmtime_r(&time, &utc) == nullptr) return text;
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &utc);
  return text;
}

std::size_t most_trainer_bytes() { return (kRecordBytes - kStorePage).count; }

std::vector<std::byte> encode(const CommitRecord& record) {
  TERRACE_CHECK(record.trainer.size() <= most_trainer_bytes());
  const auto& trainer = record.trainer;
  std::vector<std::byte> bytes((kStorePage + round_up(Bytes{trainer.size()}, kStorePage)).count);
  const RecordFields fields{record.store,     record.generation, record.step,
                            record.table_checksum, record.segments, record.bytes_written,
                            record.unix_time, record.drive,      record.table,
                            trainer.size(),   hash_bytes(trainer.data(), trainer.size())};
  std::memcpy(bytes.data() + sizeof(Envelope), &fields, sizeof fields);
  std::memcpy(bytes.data() + kStorePage.count, trainer.data(), trainer.size());
  seal(bytes, kRecordMagic, kRecordHead);
  return bytes;
}

DecodedRecord decode_record(std::span<const std::byte> bytes) {
  DecodedRecord decoded;
  const auto head = bytes.first(std::min<std::size_t>(bytes.size(), kStorePage.count));
  const auto trainer = bytes.subspan(head.size());
  decoded.blank = all_zero(head);
  if (!open_envelope(head, kRecordMagic, kRecordHead, decoded.why_not)) return decoded;
  RecordFields fields{};
  std::memcpy(&fields, bytes.data() + sizeof(Envelope), sizeof fields);
  if (fields.table > 1 || fields.trainer_bytes > most_trainer_bytes()) {
    decoded.why_not = fields.table > 1 ? "it names a third table"
                                       : "the length of the trainer's bytes is impossible";
    return decoded;
  }
  decoded.record = CommitRecord{
      fields.store, fields.generation, fields.step, fields.table_checksum, fields.segments,
      fields.bytes_written, fields.unix_time, fields.drive, fields.table, {}};
  if (fields.trainer_bytes > trainer.size() ||
      hash_bytes(trainer.data(), fields.trainer_bytes) != fields.trainer_checksum) {
    decoded.trainer_problem = "the checksum of the trainer's bytes is wrong";
    return decoded;
  }
  decoded.record->trainer.assign(reinterpret_cast<const char*>(trainer.data()),
                                 fields.trainer_bytes);
  return decoded;
}

bool looks_like_record(std::span<const std::byte> bytes) {
  std::uint64_t magic = 0;
  if (bytes.size() < sizeof magic) return false;
  std::memcpy(&magic, bytes.data(), sizeof magic);
  return magic == kRecordMagic;
}

std::string table_problem(std::span<const TableEntry> entries, const StoreGeometry& geometry,
                          std::uint32_t drive, const StoreFileLayout& layout) {
  std::size_t next = 0;
  for (std::size_t segment = 0; segment < geometry.segments(); ++segment) {
    const auto& place = geometry.place(segment);
    if (place.drive != drive) continue;
    if (next == entries.size()) return "it has too few entries";
    const auto& entry = entries[next++];
    const std::string which = "its entry of segment " + std::to_string(segment);
    if (entry.segment != segment || entry.length != place.size.count) {
      return which + " speaks of another one";
    }
    const bool in_slot = entry.offset == (layout.slot[0] + place.offset).count ||
                         entry.offset == (layout.slot[1] + place.offset).count;
    const std::uint64_t into_spares = entry.offset - layout.spares.count;
    const bool in_spares = entry.offset >= layout.spares.count && layout.spare_count > 0 &&
                           into_spares % layout.spare_bytes.count == 0 &&
                           into_spares / layout.spare_bytes.count < layout.spare_count;
    if (!in_slot && !in_spares) return which + " points nowhere";
  }
  return next == entries.size() ? "" : "it has too many entries";
}

}  // namespace terrace
