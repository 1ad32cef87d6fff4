// Text as training data: what is read, what is refused, and batches that can be drawn again.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "terrace/error.h"
#include "tools/text_data.h"

namespace terrace::gpt {
namespace {

namespace fs = std::filesystem;

class TextDataTest : public testing::Test {
 protected:
  TextDataTest() { fs::create_directories(root_); }
  ~TextDataTest() override { fs::remove_all(root_); }

  std::string write(const std::string& name, const std::string& content) const {
    const fs::path path = root_ / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << content;
    return path.string();
  }

  const fs::path root_ = fs::temp_directory_path() / ("terrace-text-" + std::to_string(::getpid()));
};

// Expects an Error of this code whose text holds all of `parts`.
template <class Function>
void expect_error(Function&& function, ErrorCode code, const std::vector<std::string>& parts) {
  try {
    function();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const auto& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
}

GptConfig small() {
  GptConfig config;
  config.context = 7;
  config.batch = 3;
  return config;
}

TEST_F(TextDataTest, ReadsAFileAsItIs) {
  const std::string content("zero \0 byte", 11);
  const TextData data(write("text", content));
  EXPECT_EQ(data.text(), content);
  EXPECT_EQ(data.bytes(), 11U);
  EXPECT_EQ(data.files(), 1U);
}

TEST_F(TextDataTest, ReadsADirectoryInSortedOrder) {
  write("b.txt", "2");
  write("a/z.txt", "1");
  write("c/d/e.txt", "3");
  const TextData data(root_.string());
  EXPECT_EQ(data.text(), "123");
  EXPECT_EQ(data.files(), 3U);
}

TEST_F(TextDataTest, SkipsHiddenBinaryAndUnreadableEntries) {
  write("text", "kept");
  write(".hidden", "no");
  write(".folder/text", "no");
  write("binary", std::string("n\0", 2));
  fs::create_symlink("loop", root_ / "loop");
  fs::create_symlink("nowhere", root_ / "dangling");
  fs::create_symlink("/proc/self/mem", root_ / "unreadable");  // opens, but its reads fail
  const TextData data(root_.string());
  EXPECT_EQ(data.text(), "kept");
  EXPECT_EQ(data.files(), 1U);
}

TEST_F(TextDataTest, ReadsFilesLongerThanOnePiece) {
  std::string content;
  for (int i = 0; i < 50000; ++i) content += std::to_string(i);
  EXPECT_EQ(TextData(write("long", content)).text(), content);
}

TEST_F(TextDataTest, NamesThePathOfWhatItCannotUse) {
  const auto missing = (root_ / "missing").string();
  expect_error([&] { TextData data(missing); }, ErrorCode::invalid_argument,
               {missing, "does not exist"});
  const auto empty = write("empty", "");
  expect_error([&] { TextData data(empty); }, ErrorCode::invalid_argument, {empty, "no text"});
  expect_error([&] { TextData data(root_.string()); }, ErrorCode::invalid_argument,
               {root_.string(), "no text"});
  expect_error([] { TextData data("/proc/self/mem"); }, ErrorCode::io,
               {"/proc/self/mem", "cannot be read"});
}

TEST_F(TextDataTest, RefusesAFileWithoutPermission) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may read everything";
  const auto path = write("secret", "text");
  fs::permissions(path, fs::perms::none);
  expect_error([&] { TextData data(path); }, ErrorCode::io, {path, "cannot be read"});
}

TEST_F(TextDataTest, NeedsOneByteMoreThanTheContext) {
  const TextData data(write("text", "1234567"));
  data.require_context(6);
  expect_error([&] { data.require_context(7); }, ErrorCode::invalid_argument, {"7 bytes", "8"});
  expect_error([&] { data.batch(small(), 1); }, ErrorCode::invalid_argument, {"7 bytes", "8"});
}

TEST_F(TextDataTest, EntropyIsThatOfTheByteCounts) {
  EXPECT_DOUBLE_EQ(TextData(write("one", "aaaa")).order0_entropy(), 0);
  EXPECT_DOUBLE_EQ(TextData(write("two", "abab")).order0_entropy(), 1);
  EXPECT_DOUBLE_EQ(TextData(write("skewed", "aabc")).order0_entropy(), 1.5);
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
  EXPECT_DOUBLE_EQ(TextData(write("all", all)).order0_entropy(), 8);
}

TEST_F(TextDataTest, TargetsAreTheBytesThatFollow) {
  std::string content;
  for (int byte = 0; byte < 256; ++byte) content += static_cast<char>(byte);
  const TextData data(write("text", content));
  const auto config = small();
  for (std::uint64_t step = 1; step <= 50; ++step) {
    const auto batch = data.batch(config, step);
    ASSERT_EQ(batch.inputs.size(), config.rows());
    ASSERT_EQ(batch.targets.size(), config.rows());
    for (std::size_t i = 0; i < config.rows(); ++i) {
      EXPECT_EQ(batch.targets[i], batch.inputs[i] + 1);
      if (i % config.context > 0) {
        EXPECT_EQ(batch.inputs[i], batch.targets[i - 1]);
      }
    }
  }
}

TEST_F(TextDataTest, ABatchDependsOnSeedAndStepAlone) {
  std::string content;
  for (int i = 0; i < 1000; ++i) content += std::to_string(i);
  const auto path = write("text", content);
  const TextData one(path);
  const TextData two(path);
  auto config = small();
  const auto fifth = one.batch(config, 5);
  EXPECT_NE(one.batch(config, 6).inputs, fifth.inputs);
  EXPECT_EQ(one.batch(config, 5).inputs, fifth.inputs);
  EXPECT_EQ(two.batch(config, 5).inputs, fifth.inputs);
  EXPECT_EQ(two.batch(config, 5).targets, fifth.targets);
  config.seed = 2;
  EXPECT_NE(one.batch(config, 5).inputs, fifth.inputs);
}

TEST_F(TextDataTest, DrawsEveryPosition) {
  const TextData data(write("text", "0123456789"));
  const auto config = small();  // positions 0, 1 and 2
  std::string seen;
  for (std::uint64_t step = 1; step <= 20; ++step) {
    const auto batch = data.batch(config, step);
    for (std::size_t row = 0; row < config.batch; ++row) {
      seen += static_cast<char>(batch.inputs[row * config.context]);
    }
  }
  EXPECT_EQ(seen.find_first_not_of("012"), std::string::npos) << seen;
  for (const char position : {'0', '1', '2'}) EXPECT_NE(seen.find(position), std::string::npos);
}

}  // namespace
}  // namespace terrace::gpt
