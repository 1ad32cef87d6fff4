#include "runtime/config_reader.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "terrace/error.h"
#include "terrace/types.h"

namespace terrace {
namespace {

using nlohmann::json;

constexpr std::size_t kMaxDepth = 16;

// Edit distance: insertions, deletions and replacements.
std::size_t distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row[b.size()];
}

bool absent(const json* value) {
  return value == nullptr || value->is_null() || (value->is_string() && *value == "auto");
}

std::optional<double> as_number(const json& value) {
  if (value.is_number()) return value.get<double>();
  if (!value.is_string()) return std::nullopt;
  const auto& text = value.get_ref<const std::string&>();
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(number)) return std::nullopt;
  return number;
}

}  // namespace

json parse_config_json(std::string_view text, std::string_view origin) {
  const auto refuse = [&](const std::string& message) {
    return Error(ErrorCode::invalid_argument, std::string(origin) + ": " + message);
  };
  std::vector<std::set<std::string>> keys;
  std::string duplicate;
  bool deep = false;
  const auto watch = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end && !keys.empty()) keys.pop_back();
    deep = deep || keys.size() > kMaxDepth;
    if (event == json::parse_event_t::key && !keys.empty() &&
        !keys.back().insert(value.get<std::string>()).second && duplicate.empty()) {
      duplicate = value.get<std::string>();
    }
    return true;
  };
  json result;
  try {
    result = json::parse(text.begin(), text.end(), watch);
  } catch (const json::exception& error) {
    throw refuse(std::string("this is not JSON: ") + error.what());
  }
  if (!duplicate.empty()) throw refuse("the key '" + duplicate + "' appears twice; remove one");
  if (deep) throw refuse("objects are nested too deeply");
  return result;
}

ConfigReader::ConfigReader(const json& object, std::string path)
    : object_(object), path_(std::move(path)) {
  if (!object.is_object()) {
    throw Error(ErrorCode::invalid_argument,
                path_ + " must be an object in braces, not " + std::string(object.type_name()));
  }
}

std::string ConfigReader::path(const std::string& key) const {
  return path_.empty() ? key : path_ + "." + key;
}

void ConfigReader::refuse(const std::string& key, const std::string& message) const {
  throw Error(ErrorCode::invalid_argument, path(key) + ": " + message);
}

const json* ConfigReader::value(const std::string& key) {
  asked_.insert(key);
  const auto found = object_.find(key);
  return found == object_.end() ? nullptr : &*found;
}

std::optional<bool> ConfigReader::flag(const std::string& key) {
  const json* found = value(key);
  if (absent(found)) return std::nullopt;
  if (!found->is_boolean()) {
    refuse(key, "true or false is expected, not " + std::string(found->type_name()));
  }
  return found->get<bool>();
}

std::optional<double> ConfigReader::number(const std::string& key) {
  const json* found = value(key);
  if (absent(found)) return std::nullopt;
  const auto number = as_number(*found);
  if (!number) refuse(key, "a number is expected, not " + found->dump(-1, ' ', true, json::error_handler_t::replace));
  return number;
}

std::optional<std::uint64_t> ConfigReader::count(const std::string& key) {
  const auto found = number(key);
  if (!found) return std::nullopt;
  if (*found < 0 || *found >= 0x1p63 || *found != std::floor(*found)) {
    refuse(key, "a whole number that is not negative is expected");
  }
  return static_cast<std::uint64_t>(*found);
}

std::optional<std::string> ConfigReader::text(const std::string& key) {
  const json* found = value(key);
  if (absent(found)) return std::nullopt;
  if (!found->is_string()) {
    refuse(key, "a text in quotes is expected, not " + std::string(found->type_name()));
  }
  return found->get<std::string>();
}

std::optional<std::uint64_t> ConfigReader::bytes(const std::string& key) {
  const json* found = value(key);
  if (absent(found)) return std::nullopt;
  if (!found->is_string()) return count(key);
  try {
    return parse_bytes(found->get<std::string>()).count;
  } catch (const Error& error) {
    refuse(key, error.what());
  }
}

void ConfigReader::object(const std::string& key,
                          const std::function<void(ConfigReader&)>& read) {
  const json* found = value(key);
  if (found == nullptr || found->is_null()) return;
  ConfigReader reader(*found, path(key));
  read(reader);
  reader.finish();
}

void ConfigReader::finish() const {
  for (const auto& [key, unused] : object_.items()) {
    if (asked_.contains(key)) continue;
    std::string nearest;
    std::size_t least = ~std::size_t{0};
    for (const auto& known : asked_) {
      const auto edits = distance(key, known);
      if (edits < least) {
        least = edits;
        nearest = known;
      }
    }
    refuse(key, "this key is unknown" +
                    (nearest.empty() ? std::string{} : "; the nearest known one is '" + nearest + "'"));
  }
}

}  // namespace terrace
