#include "runtime/config_reader.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <vector>

#include "terrace/error.h"
#include "terrace/types.h"

namespace terrace {
namespace {

using nlohmann::json;

constexpr int kMaxDepth = 16;              // of objects and arrays in each other
constexpr std::size_t kMaxShownBytes = 60;  // of a key or value in an error message

Error invalid(const std::string& message) { return Error(ErrorCode::invalid_argument, message); }

std::string shortened(std::string text) {
  if (text.size() <= kMaxShownBytes) return text;
  std::size_t end = kMaxShownBytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) --end;  // whole UTF-8
  return text.substr(0, end) + "...";
}

// "the number 3", "the text \"abc\"", "a list".
std::string describe(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  if (value.is_null()) return "null";
  const char* kind = value.is_string() ? "the text " : value.is_number() ? "the number " : "";
  return kind + shortened(value.dump());
}

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

// Follows the parser through a document and refuses what a finished document no longer shows.
class Watch {
 public:
  void see(int depth, json::parse_event_t event, const json& value) {
    using Event = json::parse_event_t;
    if (depth > kMaxDepth) throw invalid("objects and lists are nested too deeply");
    if (event == Event::object_start) open_.emplace_back();
    if (event == Event::object_end) open_.pop_back();
    if (event != Event::key) return;
    auto& object = open_.back();
    object.current = value.get_ref<const std::string&>();
    if (!object.keys.insert(object.current).second) {
      throw invalid(path() + ": this key appears twice; remove one");
    }
  }

 private:
  struct Open {
    std::set<std::string> keys;
    std::string current;
  };

  std::string path() const {
    std::string result;
    for (const auto& object : open_) result += (result.empty() ? "" : ".") + object.current;
    return shortened(result);
  }

  std::vector<Open> open_;
};

// The library's message without its own error number.
std::string reason(const json::exception& error) {
  const std::string text = error.what();
  const auto end = text.find("] ");
  return end == std::string::npos ? text : text.substr(end + 2);
}

}  // namespace

json parse_config_json(std::string_view text) {
  Watch watch;
  try {
    return json::parse(text.begin(), text.end(),
                       [&](int depth, json::parse_event_t event, json& value) {
                         watch.see(depth, event, value);
                         return true;
                       });
  } catch (const json::exception& error) {
    throw invalid("this is not JSON: " + reason(error));
  }
}

ConfigReader::ConfigReader(const json& object, std::string path)
    : object_(object), path_(std::move(path)) {
  if (object.is_object()) return;
  throw invalid((path_.empty() ? "" : path_ + ": ") + "an object in braces is expected, not " +
                describe(object));
}

std::string ConfigReader::path(const std::string& key) const {
  return path_.empty() ? shortened(key) : path_ + "." + shortened(key);
}

void ConfigReader::refuse(const std::string& key, const std::string& message) const {
  throw invalid(path(key) + ": " + message);
}

void ConfigReader::expect(const std::string& key, const std::string& what) const {
  refuse(key, what + " is expected, not " + describe(object_.at(key)));
}

const json* ConfigReader::value(const std::string& key) {
  asked_.insert(key);
  const auto found = object_.find(key);
  return found == object_.end() || absent(&*found) ? nullptr : &*found;
}

std::optional<bool> ConfigReader::flag(const std::string& key) {
  const json* found = value(key);
  if (found == nullptr) return std::nullopt;
  if (!found->is_boolean()) expect(key, "true or false");
  return found->get<bool>();
}

std::optional<double> ConfigReader::number(const std::string& key) {
  const json* found = value(key);
  if (found == nullptr) return std::nullopt;
  if (!found->is_number()) expect(key, "a number");
  return found->get<double>();
}

std::uint64_t ConfigReader::checked_count(const std::string& key, double value,
                                          CountRange range) const {
  const bool whole = value >= 0 && value < 0x1p63 && value == std::floor(value);
  const auto result = whole ? static_cast<std::uint64_t>(value) : 0;
  if (whole && result >= range.least && result <= range.most) return result;
  std::string wanted = "a whole number from " + std::to_string(range.least);
  if (range.most != CountRange{}.most) wanted += " to " + std::to_string(range.most);
  expect(key, wanted);
}

std::optional<std::uint64_t> ConfigReader::count(const std::string& key, CountRange range) {
  const json* found = value(key);
  if (found == nullptr) return std::nullopt;
  if (!found->is_number()) expect(key, "a whole number");
  // A double does not hold every integer.
  if (found->is_number_unsigned()) {
    const auto exact = found->get<std::uint64_t>();
    if (exact >= range.least && exact <= range.most) return exact;
  }
  return checked_count(key, found->get<double>(), range);
}

std::optional<std::uint64_t> ConfigReader::text_count(const std::string& key, CountRange range) {
  const json* found = value(key);
  if (found == nullptr || !found->is_string()) return count(key, range);
  const auto& text = found->get_ref<const std::string&>();
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || end != text.data() + text.size()) expect(key, "a whole number");
  return checked_count(key, number, range);
}

std::optional<std::string> ConfigReader::text(const std::string& key) {
  const json* found = value(key);
  if (found == nullptr) return std::nullopt;
  if (!found->is_string()) expect(key, "a text in quotes");
  return found->get<std::string>();
}

std::optional<std::uint64_t> ConfigReader::bytes(const std::string& key) {
  const json* found = value(key);
  if (found == nullptr) return std::nullopt;
  if (found->is_number()) return count(key);
  if (!found->is_string()) expect(key, "a size such as 4096 or \"24GiB\"");
  try {
    return parse_bytes(shortened(found->get<std::string>())).count;
  } catch (const Error& error) {
    refuse(key, error.what());
  }
}

void ConfigReader::object(const std::string& key,
                          const std::function<void(ConfigReader&)>& read) {
  const json* found = value(key);
  if (found == nullptr) return;
  ConfigReader reader(*found, path(key));
  read(reader);
  reader.finish();
}

void ConfigReader::finish() const {
  for (const auto& [key, unused] : object_.items()) {
    if (asked_.contains(key)) continue;
    const auto shown = shortened(key);  // bounds the search, too
    const auto nearest = std::min_element(
        asked_.begin(), asked_.end(), [&](const std::string& a, const std::string& b) {
          return distance(shown, a) < distance(shown, b);
        });
    refuse(key, nearest == asked_.end()
                    ? "this key is unknown"
                    : "this key is unknown; the nearest known one is '" + path(*nearest) + "'");
  }
}

}  // namespace terrace
