// What every communicator promises; today there is the group of one.
#include "terrace/communicator.h"

#include <gtest/gtest.h>

#include <vector>

namespace terrace {
namespace {

std::vector<std::byte> bytes(std::size_t count) {
  std::vector<std::byte> result(count);
  for (std::size_t i = 0; i < count; ++i) result[i] = static_cast<std::byte>(i * 7 + 1);
  return result;
}

TEST(CommunicatorContract, CollectivesOfEveryLength) {
  const auto group = make_single_rank();
  ASSERT_EQ(group->size(), 1);
  ASSERT_EQ(group->rank(), 0);
  for (const std::size_t count : {0U, 1U, 4097U}) {
    const auto sent = bytes(count);
    std::vector<std::byte> received(count);
    group->all_gather(sent, received);
    EXPECT_EQ(received, sent);
    std::vector<std::byte> exchanged(count);
    group->all_to_all(sent, exchanged);
    EXPECT_EQ(exchanged, sent);
    group->broadcast(received, 0);
    EXPECT_EQ(received, sent);
    group->barrier();
  }
}

}  // namespace
}  // namespace terrace
