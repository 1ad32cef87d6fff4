// What a configuration is refused with.
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "terrace/config.h"
#include "terrace/error.h"

namespace terrace {

inline std::string refusal(const std::string& text) {
  try {
    static_cast<void>(parse_config(text, "run.json"));
    return {};
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::invalid_argument) << error.what();
    return error.what();
  }
}

inline void expect_refused(const std::string& text, std::initializer_list<std::string> parts) {
  const auto message = refusal(text);
  ASSERT_FALSE(message.empty()) << text << " was accepted";
  EXPECT_EQ(message.rfind("run.json: ", 0), 0U) << message;
  for (const auto& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << text << "\n" << message << "\n" << part;
  }
}

}  // namespace terrace
