// The floating-point environment in which Adam computes.
#pragma once

#include <cfenv>

namespace terrace {

// Round to nearest, subnormals kept, nothing trapped, whatever the application has set (some flush
// subnormals to zero in all their threads). The environment before is put back at the end.
class DefaultFloatingPoint {
 public:
  DefaultFloatingPoint() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatingPoint() { std::fesetenv(&before_); }
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;

 private:
  std::fenv_t before_{};
};

// Compilers do not know that changing the environment changes arithmetic, and may move arithmetic
// behind the change. Not behind this.
inline double settled(double value) {
  const volatile double kept = value;
  return kept;
}

}  // namespace terrace
