// The two functions of Highway's library that the kernels need; the rest of it is in its headers.
// Its own are built for the machine that compiles, not for the one that runs.
#include <hwy/targets.h>
#include <sys/auxv.h>
#include <sys/prctl.h>

namespace hwy {

std::int64_t SupportedTargets() {
  constexpr unsigned long kSve = 1UL << 22;  // AT_HWCAP
  constexpr unsigned long kSve2 = 1UL << 1;  // AT_HWCAP2
  std::int64_t targets = HWY_NEON;
  if ((::getauxval(AT_HWCAP) & kSve) == 0) return targets;
  const int vector_bytes = ::prctl(PR_SVE_GET_VL) & PR_SVE_VL_LEN_MASK;
  targets |= HWY_SVE;
  if (vector_bytes == 32) targets |= HWY_SVE_256;
  if ((::getauxval(AT_HWCAP2) & kSve2) == 0) return targets;
  targets |= HWY_SVE2;
  if (vector_bytes == 16) targets |= HWY_SVE2_128;
  return targets;
}

ChosenTarget& GetChosenTarget() {
  static ChosenTarget chosen;
  return chosen;
}

}  // namespace hwy
