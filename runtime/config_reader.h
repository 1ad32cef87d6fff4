// One object of a configuration file: typed values by key, with errors that name the whole path.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>

namespace terrace {

// Thread rule: one thread. Every key must be asked for, or finish() refuses it.
class ConfigReader {
 public:
  // `object` must outlive this. Throws Error(invalid_argument) when it is not a JSON object.
  ConfigReader(const nlohmann::json& object, std::string path);

  // The value behind a key, or nothing when it is absent, null or "auto".
  std::optional<bool> flag(const std::string& key);
  std::optional<double> number(const std::string& key);
  std::optional<std::uint64_t> count(const std::string& key);  // 5e8 and "4" are counts too
  std::optional<std::string> text(const std::string& key);
  std::optional<std::uint64_t> bytes(const std::string& key);  // 4096 or "24GiB"
  const nlohmann::json* value(const std::string& key);         // whatever it is
  // Calls read(reader) for an object behind the key.
  void object(const std::string& key, const std::function<void(ConfigReader&)>& read);

  // Refuses keys that nobody asked for, with the nearest one that somebody did.
  void finish() const;

  std::string path(const std::string& key) const;
  // Throws Error(invalid_argument): "path.key: message".
  [[noreturn]] void refuse(const std::string& key, const std::string& message) const;

 private:
  const nlohmann::json& object_;
  std::string path_;
  std::set<std::string> asked_;
};

// Parses text; refuses duplicate keys and what is not JSON.
nlohmann::json parse_config_json(std::string_view text, std::string_view origin);

}  // namespace terrace
