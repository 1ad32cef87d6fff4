// The batch in a configuration file: its three sizes, of which any two give the third.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>

#include "terrace/config.h"
#include "tests/support/refusal.h"

namespace terrace {
namespace {

TEST(Config, BatchSizes) {
  EXPECT_EQ(parse_config(R"({"train_batch_size": 6})").train_micro_batch_size, 6U);
  EXPECT_EQ(parse_config(R"({"train_micro_batch_size_per_gpu": 6})").train_micro_batch_size, 6U);
  const auto sizes = [](const std::string& inside) {
    const auto config = parse_config("{" + inside + "}");
    return std::pair(config.train_micro_batch_size.value_or(0), config.micro_batches);
  };
  using Sizes = std::pair<std::uint64_t, std::uint32_t>;
  EXPECT_EQ(sizes(R"("train_batch_size": 8, "train_micro_batch_size_per_gpu": 4)"), Sizes(4, 2));
  EXPECT_EQ(sizes(R"("train_batch_size": 8, "gradient_accumulation_steps": 4)"), Sizes(2, 4));
  EXPECT_EQ(sizes(R"("train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5)"),
            Sizes(3, 5));
  EXPECT_EQ(sizes(R"("gradient_accumulation_steps": 7)"), Sizes(0, 7));
  EXPECT_EQ(sizes(R"("train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
                     "gradient_accumulation_steps": 4)"), Sizes(2, 4));
  expect_refused(R"({"train_batch_size": 7, "gradient_accumulation_steps": 2})",
                 {"train_batch_size", "7 is not"});
  expect_refused(R"({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 4})",
                 {"train_batch_size", "2 is not"});
  expect_refused(R"({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 4})",
                 {"train_batch_size", "7 is not"});
  expect_refused(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4,
                     "gradient_accumulation_steps": 1})",
                 {"train_batch_size", "8 is not"});
  expect_refused(R"({"gradient_accumulation_steps": 0})", {"gradient_accumulation_steps"});
  expect_refused(R"({"train_batch_size": 20000000, "train_micro_batch_size_per_gpu": 1})",
                 {"train_batch_size", "1000000"});
  expect_refused(R"({"train_batch_size": 0})", {"train_batch_size", "from 1"});
}

TEST(Config, AccumulationDtype) {
  const auto dtype = [](const std::string& name) {
    return parse_config(R"({"data_types": {"grad_accum_dtype": ")" + name + "\"}}")
        .accumulation_dtype;
  };
  EXPECT_EQ(parse_config("{}").accumulation_dtype, DType::fp32);
  EXPECT_EQ(dtype("fp32"), DType::fp32);
  EXPECT_EQ(dtype("bf16"), DType::bf16);
  EXPECT_EQ(dtype("fp16"), DType::fp16);
  expect_refused(R"({"data_types": {"grad_accum_dtype": "int8"}})",
                 {"data_types.grad_accum_dtype", "bf16"});
}

}  // namespace
}  // namespace terrace
