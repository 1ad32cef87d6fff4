// Text to train on.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <string>

#include "tools/text_data.h"

namespace terrace::gpt {

inline TextData repeated_text(const std::string& sentence) {
  const auto path = std::filesystem::temp_directory_path() /
                    ("terrace-text-" + std::to_string(::getpid()) + ".txt");
  std::FILE* file = std::fopen(path.c_str(), "w");
  for (int i = 0; i < 400; ++i) std::fputs(sentence.c_str(), file);
  std::fclose(file);
  TextData data(path.string());
  std::filesystem::remove(path);
  return data;
}

}  // namespace terrace::gpt
