// Ctrl-C and what schedulers send: the first asks for an end, the second ends at once.
#pragma once

namespace terrace::cli {

// SIGINT, SIGTERM and SIGHUP, for as long as this lives; only one at a time.
// Thread rule: one thread; signals come from anywhere.
class Interrupt {
 public:
  Interrupt();
  ~Interrupt();  // as it was
  Interrupt(const Interrupt&) = delete;
  Interrupt& operator=(const Interrupt&) = delete;

  // The signal that came, or 0.
  static int signal();
};

}  // namespace terrace::cli
