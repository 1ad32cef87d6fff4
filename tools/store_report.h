// What `terrace store` found, as text and as JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "nvme/store_check.h"
#include "terrace/io_engine.h"

namespace terrace::cli {

// 0: sound. 1: damaged. 2: not all could be checked, and what could is sound.
int exit_code(const FoundStore& store, const StoreCheck& check);

// The drives, and the commit that all of them hold.
std::string head_text(const FoundStore& store);
// Damage, counts, and what a resume will do. `seconds`: of reading segments.
std::string check_text(const FoundStore& store, const StoreCheck& check, double seconds);
nlohmann::json check_json(const FoundStore& store, const StoreCheck& check, double seconds);

// `holder`: who is using it.
std::string store_text(const FoundStore& store, const IoEngine& io,
                       const std::optional<std::string>& holder);
nlohmann::json store_json(const FoundStore& store, const IoEngine& io,
                          const std::optional<std::string>& holder);

}  // namespace terrace::cli
