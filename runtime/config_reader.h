// One object of a configuration file: typed values by key, with errors that name the whole path.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace terrace {

struct CountRange {
  std::uint64_t least = 0;
  std::uint64_t most = std::uint64_t{1} << 62;
};

// Thread rule: one thread. Every key must be asked for, or finish() refuses it.
// Whatever has the wrong type or range throws Error(invalid_argument): path, expected, found.
class ConfigReader {
 public:
  // `object` must outlive this. Throws when it is not a JSON object.
  ConfigReader(const nlohmann::json& object, std::string path);

  // The value behind a key, or nothing when it is absent, null or "auto".
  std::optional<bool> flag(const std::string& key);
  std::optional<double> number(const std::string& key);
  std::optional<std::uint64_t> count(const std::string& key, CountRange range = {});  // 5e8 too
  std::optional<std::uint64_t> text_count(const std::string& key, CountRange range);  // "8" too
  std::optional<std::uint64_t> bytes(const std::string& key);                 // 4096 or "24GiB"
  std::optional<std::string> text(const std::string& key);
  const nlohmann::json* value(const std::string& key);  // nullptr when there is none
  // Calls read(reader) for an object behind the key, then refuses what read() did not ask for.
  void object(const std::string& key, const std::function<void(ConfigReader&)>& read);

  // Refuses keys that nobody asked for, with the nearest one that somebody did.
  void finish() const;

  std::string path(const std::string& key) const;
  // Throws Error(invalid_argument): "path.key: message".
  [[noreturn]] void refuse(const std::string& key, const std::string& message) const;
  // The same, with what was found behind the key.
  [[noreturn]] void expect(const std::string& key, const std::string& what) const;

 private:
  std::uint64_t checked_count(const std::string& key, double value, CountRange range) const;

  const nlohmann::json& object_;
  std::string path_;
  std::set<std::string> asked_;
};

// Parses text; throws Error(invalid_argument) for duplicate keys and what is not JSON.
nlohmann::json parse_config_json(std::string_view text);

}  // namespace terrace
