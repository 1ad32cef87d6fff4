// From a JSON text to a Config: the document, its blocks, and what must agree between them.
#include "terrace/config.h"

#include <filesystem>
#include <fstream>
#include <sstream>

#include "runtime/config_blocks.h"
#include "runtime/config_reader.h"
#include "terrace/error.h"

namespace terrace {
namespace {

std::filesystem::path normal(const std::string& directory) {
  return (std::filesystem::path(directory) / "").lexically_normal();
}

// Checks what no block can check alone.
void finish(const ConfigReader& top, ConfigDraft& draft) {
  if (!draft.directory_wanted_by.empty() && draft.config.nvme.empty()) {
    throw Error(ErrorCode::invalid_argument,
                draft.directory_wanted_by +
                    ": device nvme needs the path of a directory, here or in terrace.nvme");
  }
  if (draft.gradient_clipping == 0) return;
  if (draft.clip != "none") {
    top.refuse("gradient_clipping",
               "clipping by the global norm is not available yet; write 0, or terrace.clip "
               "\"none\" to train without");
  }
  draft.note(top, "gradient_clipping", "has no effect, as terrace.clip is \"none\"");
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
                                 NvmeConfig drive) {
  if (!config.nvme.empty() && normal(config.nvme.front().path) != normal(drive.path)) {
    reader.refuse(key, "more than one directory is not available yet, and " + directory_named_by +
                           " names another; name one");
  }
  directory_named_by = reader.path(key);
  config.nvme = {std::move(drive)};
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
