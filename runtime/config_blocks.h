// The blocks of a configuration file, each read into a Config.
#pragma once

#include <optional>
#include <string>

#include "runtime/config_reader.h"
#include "terrace/config.h"

namespace terrace {

// A configuration while it is read: the result, and what only makes sense once all is known.
struct ConfigDraft {
  Config config;
  std::optional<double> gradient_clipping;  // as asked for; 0: none
  std::optional<std::string> clip;        // terrace.clip
  std::string directory_wanted_by;        // path of a key that needs a directory on a drive
  std::string directory_named_by;         // path of the key that named offload_directory
  std::string offload_directory;          // of offload_param and offload_optimizer

  // Takes a directory on a drive; throws when a different one was named before.
  void name_directory(const ConfigReader& reader, const std::string& key, std::string path);
  void note(const ConfigReader& reader, const std::string& key, const std::string& what);
};

// The keys of the de-facto standard form; "terrace" excluded.
void read_standard_blocks(ConfigReader& top, ConfigDraft& draft);
// What is in the block "terrace".
void read_terrace_block(ConfigReader& terrace, ConfigDraft& draft);

}  // namespace terrace
