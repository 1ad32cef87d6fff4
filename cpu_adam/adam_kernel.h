// One update kernel for each instruction set that this CPU can run.
#pragma once

#include <string>
#include <vector>

#include "terrace/adam.h"

namespace terrace {

struct AdamKernel {
  std::string instruction_set;  // Highway's name: "AVX3", "AVX2", "SSE4", ...
  void (*update)(const AdamScalars& scalars, const AdamSlice& slice);
};

// Best first; at least one.
const std::vector<AdamKernel>& adam_kernels();

}  // namespace terrace
