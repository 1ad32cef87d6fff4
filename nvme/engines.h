// The implementations of IoEngine; make_io_engine() chooses among them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "terrace/io_engine.h"

namespace terrace {

// Throws Error(unavailable) with reason and remedy when the system refuses io_uring.
std::unique_ptr<IoEngine> make_uring_engine(const IoEngineOptions& options);
// `notes` go into info(): why this engine and not another.
std::unique_ptr<IoEngine> make_thread_engine(const IoEngineOptions& options,
                                             std::vector<std::string> notes);
// Files in memory that go with the engine, for tests and machines without a drive; operations
// complete in order in reap(). See simulation.h for files that outlive it.
std::unique_ptr<IoEngine> make_memory_engine(std::uint32_t drives = 1);
// Holds back each completion until its drive's throttle lets it go.
std::unique_ptr<IoEngine> make_throttled_engine(std::unique_ptr<IoEngine> engine, Throttle read,
                                                Throttle write, Clock& clock);

}  // namespace terrace
