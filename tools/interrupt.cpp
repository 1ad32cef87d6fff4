#include "tools/interrupt.h"

#include <csignal>
#include <iterator>

namespace terrace::cli {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};

volatile std::sig_atomic_t caught = 0;
struct sigaction before[std::size(kSignals)];

// From now on each of them ends the process.
void on_signal(int number) {
  caught = number;
  for (const int other : kSignals) {
    struct sigaction usual {};
    usual.sa_handler = SIG_DFL;
    ::sigaction(other, &usual, nullptr);
  }
}

}  // namespace

Interrupt::Interrupt() {
  for (std::size_t i = 0; i < std::size(kSignals); ++i) {
    struct sigaction action {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESTART;
    ::sigaction(kSignals[i], nullptr, &before[i]);
    // What is ignored stays so: nohup means it.
    if (before[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &action, nullptr);
  }
}

Interrupt::~Interrupt() {
  for (std::size_t i = 0; i < std::size(kSignals); ++i) {
    ::sigaction(kSignals[i], &before[i], nullptr);
  }
}

int Interrupt::signal() { return caught; }

}  // namespace terrace::cli
