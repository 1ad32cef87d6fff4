// The half of check_store() that reads segments.
#pragma once

#include "nvme/store_check.h"

namespace terrace {

// Reads every segment of the newest commit, and of the one before what still lies there, and adds
// to `check`. With several MiB of each drive in flight; hashes on the caller's thread.
void check_segments(IoEngine& io, const FoundStore& store, const CheckProgress& progress,
                    StoreCheck& check);

// Describes it, unless there are too many, and counts it.
void add_damage(StoreCheck& check, StoreDamage damage);

}  // namespace terrace
