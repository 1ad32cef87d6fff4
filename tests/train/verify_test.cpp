// The comparison with in-memory training notices one changed byte, on the drive or anywhere.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>

#include "tests/support/text.h"
#include "tools/tiered_trainer.h"

namespace terrace::gpt {
namespace {

TEST(Verify, FindsOneChangedByteInTheStore) {
  GptConfig gpt;
  gpt.layers = 2;
  gpt.width = 64;
  gpt.heads = 2;
  gpt.context = 16;
  gpt.batch = 2;
  Config config;
  config.segment = 4_KiB;
  config.nvme = {{std::filesystem::current_path().string(), {}, {}}};
  config.placement.master_weight = config.placement.momentum = config.placement.variance =
      TierFractions{0, 0, 1};
  config.placement.parameter = TierFractions{0, 1, 0};
  config.store.slots = 1;
  config.store.checksums = false;  // they would notice first
  EnginePorts ports;
  ports.speeds = Speeds{};
  TieredTrainer tiered(gpt, config, std::move(ports));
  ReferenceTrainer reference(gpt, config.optimizer);
  const auto data = repeated_text("one changed byte must be found. ");
  for (std::uint64_t s = 1; s <= 3; ++s) {
    const auto batch = data.batch(gpt, s);
    EXPECT_EQ(tiered.step({batch}, 1e-3).loss, reference.step({batch}, 1e-3).loss);
  }
  tiered.engine().drain();
  const auto before = state_hash(tiered.engine());
  EXPECT_EQ(difference(tiered.engine(), reference), "");

  const std::string path = tiered.engine().stats().drives.at(0).path;
  const int file = ::open(path.c_str(), O_RDWR);
  ASSERT_GE(file, 0) << path;
  unsigned char byte = 0;
  ASSERT_EQ(::pread(file, &byte, 1, 1000), 1);
  byte ^= 1;
  ASSERT_EQ(::pwrite(file, &byte, 1, 1000), 1);
  ASSERT_EQ(::fsync(file), 0);
  EXPECT_NE(difference(tiered.engine(), reference), "");
  EXPECT_NE(state_hash(tiered.engine()), before);
  byte ^= 1;
  ASSERT_EQ(::pwrite(file, &byte, 1, 1000), 1);
  ASSERT_EQ(::fsync(file), 0);
  ::close(file);
  EXPECT_EQ(difference(tiered.engine(), reference), "");
}

}  // namespace
}  // namespace terrace::gpt
