#include "nvme/engines.h"
#include "terrace/error.h"

namespace terrace {
namespace {

std::unique_ptr<IoEngine> choose(const IoEngineOptions& options) {
  switch (options.kind) {
    case IoEngineKind::memory: return make_memory_engine(options.drives);
    case IoEngineKind::threads: return make_thread_engine(options, {});
    case IoEngineKind::io_uring:
#ifdef TERRACE_HAVE_URING
      return make_uring_engine(options);
#else
      throw Error(ErrorCode::unavailable,
                  "this build has no io_uring engine: install liburing and configure again");
#endif
    case IoEngineKind::automatic: break;
  }
  IoEngineOptions wanted = options;
  wanted.kind = IoEngineKind::io_uring;
  try {
    return choose(wanted);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unavailable) throw;
    return make_thread_engine(options, {std::string("threads take over: ") + error.what()});
  }
}

}  // namespace

std::unique_ptr<IoEngine> make_io_engine(const IoEngineOptions& options) {
  auto engine = choose(options);
  if (options.read.active() || options.write.active()) {
    engine = make_throttled_engine(std::move(engine), options.read, options.write, steady_clock());
  }
  return engine;
}

}  // namespace terrace
