// One run at a time in a directory, whatever becomes of the run. With other processes.
#include "nvme/store_lock.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>

#include "terrace/error.h"
#include "tests/support/directory.h"

namespace terrace {
namespace {

class StoreLockTest : public testing::Test {
 protected:
  std::string file() const { return directory_.path() + "/terrace.lock"; }

  // Another process that holds the lock until it is killed.
  pid_t hold() const {
    int ready[2];
    EXPECT_EQ(::pipe(ready), 0);
    const pid_t child = ::fork();
    if (child == 0) {
      const StoreLock lock(directory_.path());
      [[maybe_unused]] const auto told = ::write(ready[1], "x", 1);
      for (;;) ::pause();
    }
    char byte = 0;
    EXPECT_EQ(::read(ready[0], &byte, 1), 1);
    ::close(ready[0]);
    ::close(ready[1]);
    return child;
  }
  static void kill_and_wait(pid_t child) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }

  const Directory directory_{"lock"};
};

TEST_F(StoreLockTest, IsGoneWithItsOwner) {
  {
    const StoreLock lock(directory_.path());
    EXPECT_TRUE(std::filesystem::exists(file()));
  }
  EXPECT_FALSE(std::filesystem::exists(file()));
}

TEST_F(StoreLockTest, RefusesASecondProcessAndNamesTheFirst) {
  const pid_t child = hold();
  try {
    const StoreLock lock(directory_.path());
    ADD_FAILURE() << "two have it";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unavailable);
    const std::string said = error.what();
    EXPECT_NE(said.find("process " + std::to_string(child)), std::string::npos) << said;
    EXPECT_NE(said.find(directory_.path()), std::string::npos) << said;
  }
  EXPECT_NE(lock_holder(directory_.path()).value_or("").find(std::to_string(child)),
            std::string::npos);
  kill_and_wait(child);
}

TEST_F(StoreLockTest, IsTakenOverFromAProcessThatWasKilled) {
  kill_and_wait(hold());
  EXPECT_TRUE(std::filesystem::exists(file()));
  EXPECT_FALSE(lock_holder(directory_.path()).has_value());
  const StoreLock lock(directory_.path());
  std::ifstream text(file());
  std::string owner{std::istreambuf_iterator<char>(text), {}};
  EXPECT_NE(owner.find("process " + std::to_string(::getpid())), std::string::npos) << owner;
}

// Its owner may be dying just now.
TEST_F(StoreLockTest, WaitsForAnOwnerThatEnds) {
  const pid_t child = hold();
  const pid_t killer = ::fork();
  if (killer == 0) {
    ::usleep(100'000);
    ::kill(child, SIGKILL);
    ::_exit(0);
  }
  const StoreLock lock(directory_.path());
  ::waitpid(killer, nullptr, 0);
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(std::filesystem::exists(file()));
}

TEST_F(StoreLockTest, ReusesAFileThatWasLeft) {
  std::ofstream(file()) << "process 1 on a host that is long gone, with a text that is longer";
  {
    const StoreLock lock(directory_.path());
    std::ifstream text(file());
    const std::string owner{std::istreambuf_iterator<char>(text), {}};
    EXPECT_EQ(owner.find("longer"), std::string::npos) << owner;
  }
  EXPECT_FALSE(std::filesystem::exists(file()));
}

TEST_F(StoreLockTest, MovesWithItsOwner) {
  StoreLock lock(directory_.path());
  std::optional<StoreLock> moved(std::move(lock));
  EXPECT_TRUE(std::filesystem::exists(file()));
  moved.reset();
  EXPECT_FALSE(std::filesystem::exists(file()));
}

TEST_F(StoreLockTest, SaysWhyThereIsNone) {
  try {
    const StoreLock lock(directory_.path() + "/missing");
    ADD_FAILURE() << "it was made";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::io);
    EXPECT_NE(std::string(error.what()).find("missing/terrace.lock"), std::string::npos);
  }
  EXPECT_FALSE(lock_holder(directory_.path()).has_value());
}

// Many begin at once, again and again: never two of them at a time.
TEST_F(StoreLockTest, IsHeldByOneOfMany) {
  const std::string mark = directory_.path() + "/mark";
  std::vector<pid_t> children;
  for (int i = 0; i < 6; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      int broken = 0;
      for (int round = 0; round < 20; ++round) {
        try {
          const StoreLock lock(directory_.path());
          std::error_code error;
          if (!std::filesystem::create_directory(mark, error)) ++broken;
          ::usleep(200);
          std::filesystem::remove(mark, error);
        } catch (const Error&) {
          // Waited for too long: no harm.
        }
      }
      ::_exit(broken == 0 ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const auto child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
}

// Another directory's lock would not cover it.
TEST(StoreLock, RefusesAStoreWithAnotherName) {
  const Directory place("lock-names");
  const auto one = place.path() + "/one";
  const auto two = place.path() + "/two";
  std::filesystem::create_directories(one);
  std::filesystem::create_directories(two);
  std::ofstream(one + "/terrace.store") << "a store";
  const auto refused = [](const std::string& directory) {
    try {
      const StoreLock lock(directory);
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  EXPECT_EQ(refused(one), "");
  std::filesystem::create_symlink(one + "/terrace.store", two + "/terrace.store");
  EXPECT_NE(refused(two).find("symbolic link"), std::string::npos);
  std::filesystem::remove(two + "/terrace.store");
  std::filesystem::create_hard_link(one + "/terrace.store", two + "/terrace.store");
  EXPECT_NE(refused(one).find("hard link"), std::string::npos);
  EXPECT_NE(refused(two).find("hard link"), std::string::npos);
  std::filesystem::remove(two + "/terrace.store");
  std::filesystem::create_directory(two + "/terrace.store");
  EXPECT_NE(refused(two).find("no file"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(two + "/terrace.lock"));
}

}  // namespace
}  // namespace terrace
