#include "tools/store_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <nlohmann/json.hpp>

#include "tools/report.h"

namespace terrace::cli {
namespace {

using State = StoreOutlook::State;

constexpr std::size_t kShownDamages = 100;
constexpr std::size_t kShownTrainer = 400;  // bytes

std::string_view name(State state) {
  switch (state) {
    case State::empty: return "empty";
    case State::committed: return "committed";
    case State::damaged: return "damaged";
  }
  return "";
}

bool any_of(const StoreCheck& check, StorePlace place) {
  return std::any_of(check.damages.begin(), check.damages.end(),
                     [&](const auto& damage) { return damage.place == place; });
}

std::string number(const FoundDrive& drive) {
  return drive.number ? std::to_string(*drive.number) : "?";
}

std::string which(const StoreDamage& damage) {
  if (damage.place == StorePlace::file) return "the file";
  if (damage.place != StorePlace::segment) {
    return fmt::format("{} {}", to_string(damage.place), damage.copy);
  }
  return fmt::format("segment {} ({}, step {})", damage.segment, damage.region,
                     damage.generation);
}

// What may have done it, and what becomes of it.
std::string hint(const FoundStore& store, const StoreDamage& damage) {
  const auto* commit = store.newest();
  const bool superblock =
      damage.place == StorePlace::header || damage.place == StorePlace::text;
  if (damage.place == StorePlace::record && commit != nullptr) {
    return fmt::format("a power cut during a commit can leave that; --resume continues at step {}",
                       commit->step);
  }
  if (superblock && commit != nullptr) return "the other copy is whole; --resume goes on with it";
  const bool unfinished = store.drives[damage.drive].store.unfinished;
  if (store.outlook.state == State::empty && (superblock || unfinished)) {
    return "a kill or a power cut can leave that; no step was committed";
  }
  return "";
}

std::string damage_text(const FoundStore& store, const StoreDamage& damage) {
  auto text = fmt::format("damaged: drive {}, {}, offset {}, {} bytes: {}: {}\n",
                          number(store.drives[damage.drive]), store.drives[damage.drive].path,
                          damage.extent.offset.count, damage.extent.size.count, which(damage),
                          damage.why);
  if (damage.place == StorePlace::segment && !damage.unreadable) {
    text += fmt::format("         checksum {} is expected, {} found\n", damage.expected,
                        damage.found);
  }
  if (const auto more = hint(store, damage); !more.empty()) text += "         " + more + "\n";
  return text;
}

std::string missing_text(const FoundStore& store) {
  std::string text;
  for (const auto drive : store.missing) {
    text += fmt::format("drive {} of {} is missing: name its directory too\n", drive,
                        store.superblock()->weights.size());
  }
  return text;
}

// Records that are newer than what all drives hold.
std::string cut_commits_text(const FoundStore& store) {
  std::string text;
  const auto* newest = store.newest();
  if (!store.missing.empty()) return text;
  const auto holders = [&](std::uint64_t generation) {
    std::size_t count = 0;
    for (const auto& drive : store.drives) {
      for (const auto& record : drive.store.record) {
        if (record.record && record.record->generation == generation) ++count;
      }
    }
    return count;
  };
  std::set<std::uint64_t> damaged;  // every drive has the record: no power cut did that
  for (std::size_t d = 0; d < store.drives.size(); ++d) {
    for (const auto& record : store.drives[d].store.record) {
      if (!record.record) continue;
      if (newest != nullptr && record.record->generation <= newest->generation) continue;
      if (holders(record.record->generation) == store.drives.size()) {
        if (!damaged.insert(record.record->generation).second) continue;
        text += fmt::format("note: step {} was committed and is lost by damage; --resume {}\n",
                            record.record->step,
                            newest == nullptr
                                ? std::string("finds no other")
                                : fmt::format("goes back to step {}", newest->step));
        continue;
      }
      text += fmt::format("note: drive {} has a record of step {} and not all drives do: that "
                          "commit was cut short\n",
                          number(store.drives[d]), record.record->step);
    }
  }
  return text;
}

std::string outcome_text(const FoundStore& store, const StoreCheck& check) {
  const auto& outlook = store.outlook;
  if (outlook.state == State::damaged) {
    return fmt::format("--resume refuses this store: {}: {}. Bring back its files from a copy, or "
                       "discard it (--discard) if it is no loss\n",
                       store.drives[outlook.drive].path, outlook.why);
  }
  if (outlook.state == State::empty) {
    return fmt::format("{}no step is committed: --resume trains from the start\n",
                       check.damaged == 0 ? "sound; " : "nothing is lost; ");
  }
  if (!store.missing.empty()) return "nothing can be resumed without all drives\n";
  const auto step = store.newest()->step;
  if (any_of(check, StorePlace::segment) || check.damages.size() < check.damaged) {
    return "--resume stops at what is damaged, in its first step at the latest, and changes "
           "nothing. Bring back the files from a copy, or discard the store (--discard)\n";
  }
  if (check.damaged > 0) {
    return fmt::format("all segments are sound: --resume continues at step {}\n", step);
  }
  if (!check.checksums) {
    return fmt::format("sound as far as it can be told: --resume continues at step {}\n", step);
  }
  return fmt::format("sound: --resume continues at step {}\n", step);
}

std::string counts_text(const FoundStore& store, const StoreCheck& check, double seconds) {
  if (store.newest() == nullptr) return "";
  if (!check.checksums) {
    return fmt::format("checksums are off: only what the files say about themselves was checked, "
                       "not their {} segments\n", check.segments);
  }
  auto text = fmt::format("read {} in {} ({:.2f} GB/s): {} of {} segments sound",
                          to_string(check.read), duration_text(seconds),
                          static_cast<double>(check.read.count) / seconds / 1e9, check.sound,
                          check.segments);
  if (check.unreadable > 0) text += fmt::format(", {} unreadable", check.unreadable);
  text += "\n";
  if (check.older_segments == 0) return text;
  return text + fmt::format("of the commit before, which the next steps overwrite, {} of {} copies "
                            "still hold\n", check.older_sound, check.older_segments);
}

bool is_text(const std::string& bytes) { return printable(bytes) == bytes; }

nlohmann::json record_json(const CommitRecord& record) {
  return {{"generation", record.generation},
          {"step", record.step},
          {"unix_time", record.unix_time},
          {"time", time_text(record.unix_time)},
          {"segments", record.segments},
          {"table", record.table},
          {"bytes_written", record.bytes_written},
          {"trainer_bytes", record.trainer.size()}};
}

// Where the segments of a table lie.
struct InUse {
  std::uint64_t slot[2] = {0, 0};
  std::uint64_t spares = 0;
};

InUse in_use(const InspectedStore& store, std::size_t table) {
  InUse result;
  for (const auto& entry : store.table[table]) {
    if (Bytes{entry.offset} >= store.layout.spares) ++result.spares;
    else ++result.slot[Bytes{entry.offset} >= store.layout.slot[1] ? 1 : 0];
  }
  return result;
}

// The newest commit that this drive holds, of those that count.
std::optional<std::size_t> shown_record(const FoundStore& store, std::size_t drive) {
  if (!store.outlook.commit.empty()) return store.outlook.commit[drive];
  return {};
}

std::string drive_text(const FoundStore& found, const IoEngine& io, std::size_t d) {
  const auto& drive = found.drives[d];
  const auto* superblock = drive.store.sound();
  if (superblock == nullptr) {
    return fmt::format("drive {}: {}: {}\n", number(drive), drive.path,
                       drive.store.unfinished ? "its creation was cut short"
                                              : "both copies of its superblock are damaged");
  }
  const StoreGeometry geometry(superblock->regions, superblock->weights);
  const auto& share = geometry.shares()[superblock->drive];
  const auto info = io.file_info(drive.file);
  auto text = fmt::format(
      "drive {}: {}, {}, weight {}\n"
      "  share {} in {} segments ({:.1f}% of {}), {} spares\n",
      superblock->drive, drive.path, to_string(info.size), superblock->weights[superblock->drive],
      to_string(share.bytes), share.segments,
      100.0 * static_cast<double>(share.bytes.count) /
          static_cast<double>(std::max<std::uint64_t>(1, geometry.end().count)),
      to_string(geometry.end()), drive.store.layout.spare_count);
  text += info.direct ? "  direct I/O\n" : "  not direct: " + info.direct_note + "\n";
  const auto shown = shown_record(found, d);
  if (!shown) return text;
  const auto& record = *drive.store.record[*shown].record;
  const auto used = in_use(drive.store, *shown);
  text += fmt::format("  segments in slot A {}, in slot B {}, in spares {}\n", used.slot[0],
                      used.slot[1], used.spares);
  text += "  written since the store was made: " + to_string(Bytes{record.bytes_written});
  if (record.step > 0) {
    text += fmt::format(", {} per step", to_string(Bytes{record.bytes_written / record.step}));
  }
  return text + "\n";
}

std::string records_text(const InspectedStore& store) {
  std::string text;
  for (std::size_t i = 0; i < 2; ++i) {
    const auto& record = store.record[i];
    text += fmt::format("  record {}: ", i);
    if (record.record) {
      text += fmt::format("commit {} of step {}, {}, table {}", record.record->generation,
                          record.record->step, time_text(record.record->unix_time),
                          record.record->table);
    } else if (record.blank) {
      text += "blank";
    } else {
      text += "damaged: " + record.why_not;
    }
    if (store.given_up(i)) text += ": given up to the next commit";
    else if (!store.table_problem[i].empty()) text += ": " + store.table_problem[i];
    text += "\n";
  }
  return text;
}

std::string trainer_text(const std::string& trainer) {
  if (trainer.empty()) return "none";
  if (!is_text(trainer)) return fmt::format("{} bytes", trainer.size());
  if (trainer.size() <= kShownTrainer) return trainer;
  return fmt::format("{}... ({} bytes)", trainer.substr(0, kShownTrainer), trainer.size());
}

// Offsets and sizes in the file.
nlohmann::json layout_json(const StoreFileLayout& layout) {
  const auto both = [](const Bytes(&offsets)[2]) {
    return nlohmann::json{offsets[0].count, offsets[1].count};
  };
  return {{"header", both(layout.header)},
          {"text", both(layout.text)},
          {"text_bytes", layout.text_bytes.count},
          {"record", both(layout.record)},
          {"record_bytes", kRecordBytes.count},
          {"table", both(layout.table)},
          {"table_bytes", layout.table_bytes.count},
          {"slot", both(layout.slot)},
          {"spares", layout.spares.count},
          {"spare_bytes", layout.spare_bytes.count},
          {"bytes", layout.size.count}};
}

nlohmann::json number_json(const FoundDrive& drive) {
  return drive.number ? nlohmann::json(*drive.number) : nlohmann::json();
}

nlohmann::json drive_json(const FoundStore& found, const IoEngine& io, std::size_t d) {
  const auto& drive = found.drives[d];
  const auto info = io.file_info(drive.file);
  nlohmann::json out = {{"directory", drive.directory},
                        {"path", drive.path},
                        {"size_bytes", info.size.count},
                        {"direct", info.direct},
                        {"direct_note", info.direct_note},
                        {"unfinished", drive.store.unfinished},
                        {"drive", number_json(drive)}};
  const auto* superblock = drive.store.sound();
  if (superblock == nullptr) return out;
  const StoreGeometry geometry(superblock->regions, superblock->weights);
  const auto& share = geometry.shares()[superblock->drive];
  out["weight"] = superblock->weights[superblock->drive];
  out["share_bytes"] = share.bytes.count;
  out["segments"] = share.segments;
  out["spares"] = drive.store.layout.spare_count;
  out["layout"] = layout_json(drive.store.layout);
  if (const auto shown = shown_record(found, d)) {
    const auto used = in_use(drive.store, *shown);
    out["in_use"] = {{"slot_a", used.slot[0]}, {"slot_b", used.slot[1]}, {"spares", used.spares}};
    out["bytes_written"] = drive.store.record[*shown].record->bytes_written;
  }
  for (std::size_t i = 0; i < 2; ++i) {
    const auto& record = drive.store.record[i];
    nlohmann::json one = {{"blank", record.blank},
                          {"valid", record.record.has_value()},
                          {"given_up", drive.store.given_up(i)}};
    if (record.record) {
      one.update(record_json(*record.record));
      one["table_problem"] = drive.store.table_problem[i];
    } else {
      one["why_not"] = record.why_not;
    }
    out["records"].push_back(one);
  }
  return out;
}

nlohmann::json head_json(const FoundStore& store) {
  nlohmann::json out = {{"state", name(store.outlook.state)},
                        {"why", store.outlook.why},
                        {"missing_drives", store.missing},
                        {"commit", nullptr}};
  if (const auto* superblock = store.superblock()) out["store"] = superblock->store;
  if (const auto* commit = store.newest()) out["commit"] = record_json(*commit);
  return out;
}

}  // namespace

int exit_code(const FoundStore& store, const StoreCheck& check) {
  if (check.damaged > check.unreadable || store.outlook.state == State::damaged) return 1;
  return check.unreadable > 0 || !store.missing.empty() ? 2 : 0;
}

std::string head_text(const FoundStore& store) {
  std::string text;
  if (const auto* superblock = store.superblock()) {
    text = fmt::format("store {:016x} of {} drive{}", superblock->store,
                       superblock->weights.size(), superblock->weights.size() == 1 ? "" : "s");
    if (const auto* commit = store.newest()) {
      text += fmt::format(": step {}, committed {}", commit->step, time_text(commit->unix_time));
    }
    text += "\n";
  }
  return text;
}

std::string check_text(const FoundStore& store, const StoreCheck& check, double seconds) {
  std::string text;
  for (std::size_t i = 0; i < std::min(kShownDamages, check.damages.size()); ++i) {
    text += damage_text(store, check.damages[i]);
  }
  if (check.damaged > kShownDamages) {
    text += fmt::format("and {} more (--json lists {})\n", check.damaged - kShownDamages,
                        check.damages.size());
  }
  return text + missing_text(store) + cut_commits_text(store) +
         counts_text(store, check, seconds) + outcome_text(store, check);
}

nlohmann::json check_json(const FoundStore& store, const StoreCheck& check, double seconds) {
  auto out = head_json(store);
  out["checksums"] = check.checksums;
  out["segments"] = check.segments;
  out["sound"] = check.sound;
  out["damaged"] = check.damaged;
  out["unreadable"] = check.unreadable;
  out["older"] = {{"segments", check.older_segments}, {"sound", check.older_sound}};
  out["read_bytes"] = check.read.count;
  out["seconds"] = seconds;
  out["exit_code"] = exit_code(store, check);
  out["outcome"] = outcome_text(store, check);
  for (std::size_t d = 0; d < store.drives.size(); ++d) {
    const auto& drive = store.drives[d];
    out["drives"].push_back({{"drive", number_json(drive)}, {"path", drive.path}});
  }
  out["damages"] = nlohmann::json::array();
  for (const auto& damage : check.damages) {
    nlohmann::json one = {{"place", to_string(damage.place)},
                          {"drive", number_json(store.drives[damage.drive])},
                          {"path", store.drives[damage.drive].path},
                          {"offset", damage.extent.offset.count},
                          {"bytes", damage.extent.size.count},
                          {"why", damage.why}};
    if (damage.place == StorePlace::segment) {
      one.update({{"segment", damage.segment},
                  {"region", damage.region},
                  {"step", damage.generation},
                  {"expected", damage.expected},
                  {"found", damage.found},
                  {"unreadable", damage.unreadable}});
    } else if (damage.place != StorePlace::file) {
      one["copy"] = damage.copy;
    }
    out["damages"].push_back(one);
  }
  return out;
}

std::string store_text(const FoundStore& store, const IoEngine& io,
                       const std::optional<std::string>& holder) {
  auto text = head_text(store);
  if (holder) text += "in use by " + *holder + "\n";
  if (const auto* superblock = store.superblock()) {
    for (const auto& [key, value] : superblock->identity) {
      text += fmt::format("  {:<18}{}\n", key, value);
    }
    text += fmt::format("  {:<18}{}\n", "checksums", superblock->checksums ? "on" : "off");
  }
  if (const auto* commit = store.newest()) {
    text += fmt::format("  {:<18}{}\n", "commit", commit->generation);
    text += fmt::format("  {:<18}{}\n", "trainer's bytes", trainer_text(commit->trainer));
  }
  for (std::size_t d = 0; d < store.drives.size(); ++d) {
    text += drive_text(store, io, d);
    if (store.drives[d].store.sound() != nullptr) text += records_text(store.drives[d].store);
  }
  text += missing_text(store);
  if (store.outlook.state == State::empty) text += "no step is committed\n";
  if (store.outlook.state == State::damaged) {
    text += fmt::format("damaged: {}: {}\n", store.drives[store.outlook.drive].path,
                        store.outlook.why);
  }
  return text;
}

nlohmann::json store_json(const FoundStore& store, const IoEngine& io,
                          const std::optional<std::string>& holder) {
  auto out = head_json(store);
  out["in_use_by"] = nullptr;
  if (holder) out["in_use_by"] = *holder;
  if (const auto* superblock = store.superblock()) {
    out["checksums"] = superblock->checksums;
    for (const auto& [key, value] : superblock->identity) out["identity"][key] = value;
  }
  if (const auto* commit = store.newest(); commit != nullptr && is_text(commit->trainer)) {
    out["trainer"] = commit->trainer;
  }
  for (std::size_t d = 0; d < store.drives.size(); ++d) {
    out["drives"].push_back(drive_json(store, io, d));
  }
  return out;
}

}  // namespace terrace::cli
