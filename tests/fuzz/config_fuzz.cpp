// Any bytes give a Config or an Error that names the origin, and what is accepted makes sense.
#include <cmath>
#include <cstdint>
#include <string>

#include "terrace/config.h"
#include "terrace/error.h"

namespace terrace {
namespace {

void check(const Config& config) {
  TERRACE_CHECK(config.nvme.size() <= 1);
  TERRACE_CHECK(config.io.queue_depth > 0 && config.io.threads > 0);
  TERRACE_CHECK(config.io.block.count >= 4096 && config.io.block.count % 4096 == 0);
  TERRACE_CHECK(config.segment.count >= 4096);
  TERRACE_CHECK((config.segment.count & (config.segment.count - 1)) == 0);
  static_cast<void>(adam_scalars(config.optimizer, config.learning_rate, 1));
  for (const auto& choice :
       {config.placement.parameter, config.placement.master_weight, config.placement.momentum,
        config.placement.variance, config.placement.activation}) {
    if (choice) TERRACE_CHECK(std::abs(choice->hbm + choice->dram + choice->nvme - 1) < 1e-5);
  }
}

}  // namespace
}  // namespace terrace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace terrace;
  try {
    check(parse_config({reinterpret_cast<const char*>(data), size}, "fuzz"));
  } catch (const Error& error) {
    TERRACE_CHECK(error.code() == ErrorCode::invalid_argument);
    TERRACE_CHECK(std::string(error.what()).starts_with("fuzz: "));
  }
  return 0;
}
