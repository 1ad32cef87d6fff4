// From a JSON text to a Config: the document, its blocks, and what must agree between them.
#include "terrace/config.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "runtime/config_blocks.h"
#include "runtime/config_reader.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr double kUsualNorm = 1.0;

std::filesystem::path normal(const std::string& directory) {
  return (std::filesystem::path(directory) / "").lexically_normal();
}

// The directories of terrace.nvme, or the one of the offload blocks.
void settle_directories(ConfigDraft& draft) {
  auto& drives = draft.config.nvme;
  if (!draft.offload_directory.empty()) {
    if (drives.empty()) drives = {{draft.offload_directory}};
    const bool named = std::any_of(drives.begin(), drives.end(), [&](const NvmeConfig& drive) {
      return normal(drive.path) == normal(draft.offload_directory);
    });
    if (!named) {
      throw Error(ErrorCode::invalid_argument,
                  draft.directory_named_by + ": " + draft.offload_directory +
                      " is not among the directories of terrace.nvme; name it there too");
    }
  }
  for (std::size_t i = 0; i < drives.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (normal(drives[i].path) != normal(drives[j].path)) continue;
      throw Error(ErrorCode::invalid_argument,
                  "terrace.nvme: " + drives[i].path + " is named twice; name each drive once");
    }
  }
}

// terrace.clip says whether, gradient_clipping how much; either may be left out.
void settle_clipping(const ConfigReader& top, ConfigDraft& draft) {
  const double norm = draft.gradient_clipping.value_or(draft.clip == "global" ? kUsualNorm : 0);
  if (draft.clip == "none") {
    if (norm > 0) {
      draft.note(top, "gradient_clipping", "has no effect, as terrace.clip is \"none\"");
    }
    return;
  }
  if (draft.clip == "global" && norm == 0) {
    top.refuse("gradient_clipping",
               "0 is no norm to clip to, which terrace.clip \"global\" asks for; write 1.0");
  }
  draft.config.gradient_clipping = norm;
}

// Checks what no block can check alone.
void finish(const ConfigReader& top, ConfigDraft& draft) {
  settle_directories(draft);
  if (!draft.directory_wanted_by.empty() && draft.config.nvme.empty()) {
    throw Error(ErrorCode::invalid_argument,
                draft.directory_wanted_by +
                    ": device nvme needs the path of a directory, here or in terrace.nvme");
  }
  settle_clipping(top, draft);
}

Config parse(std::string_view text) {
  const nlohmann::json document = parse_config_json(text);
  ConfigDraft draft;
  ConfigReader top(document, "");
  read_standard_blocks(top, draft);
  top.object("terrace", [&](ConfigReader& r) { read_terrace_block(r, draft); });
  top.finish();
  finish(top, draft);
  return std::move(draft.config);
}

}  // namespace

void ConfigDraft::note(const ConfigReader& reader, const std::string& key,
                       const std::string& what) {
  config.notes.push_back(reader.path(key) + ": " + what);
}

void ConfigDraft::name_directory(const ConfigReader& reader, const std::string& key,
                                 std::string path) {
  if (!offload_directory.empty() && normal(offload_directory) != normal(path)) {
    reader.refuse(key, directory_named_by +
                           " names another directory; name several drives in terrace.nvme");
  }
  directory_named_by = reader.path(key);
  offload_directory = std::move(path);
}

Config parse_config(std::string_view json_text, std::string_view origin) {
  try {
    return parse(json_text);
  } catch (const Error& error) {
    throw Error(error.code(), std::string(origin) + ": " + error.what());
  }
}

Config load_config(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file || text.fail()) {
    throw Error(ErrorCode::io,
                "the configuration " + path + " cannot be read or is empty; check the path");
  }
  return parse_config(text.str(), path);
}

}  // namespace terrace
