// One update kernel for each instruction set that this CPU can run.
#pragma once

#include <vector>

#include "terrace/adam.h"

namespace terrace {

// Throws Error(invalid_argument) naming what no kernel can do.
void check(const AdamSlice& slice);

// Thread rule: every call from any thread.
class AdamKernel {
 public:
  using Function = void (*)(const AdamScalars& scalars, const AdamSlice& slice);

  AdamKernel(const char* instruction_set, Function function)
      : instruction_set_(instruction_set), function_(function) {}

  const char* instruction_set() const { return instruction_set_; }  // Highway's name: "AVX3", ...
  // The slice has passed check(). Computes in the default floating-point environment and puts the
  // caller's back.
  void update(const AdamScalars& scalars, const AdamSlice& slice) const;

 private:
  const char* instruction_set_;
  Function function_;
};

// Best first; at least one.
const std::vector<AdamKernel>& adam_kernels();

}  // namespace terrace
