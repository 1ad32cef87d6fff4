#include "tools/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "terrace/error.h"

namespace terrace::cli {
namespace {

struct Pipe {
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) {
      throw Error(ErrorCode::unavailable, std::string("making a pipe failed: ") +
                                              std::strerror(errno) +
                                              "; raise the limit of open files (ulimit -n)");
    }
    read = ends[0];
    write = ends[1];
  }
  ~Pipe() {
    if (read >= 0) ::close(read);
    close_write();
  }
  Pipe(const Pipe&) = delete;
  void close_write() {
    if (write >= 0) ::close(write);
    write = -1;
  }
  int read = -1;
  int write = -1;
};

// In the child: only calls that are safe after fork() in a program with threads.
[[noreturn]] void become(char* const* arguments, int out, int errors, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(127);  // it died before it could take the child along
  const int null = ::open("/dev/null", O_RDONLY);
  if (null >= 0) ::dup2(null, STDIN_FILENO);
  ::dup2(out, STDOUT_FILENO);
  ::dup2(errors, STDERR_FILENO);
  ::setpgid(0, 0);  // Ctrl-C is for the parent, which then ends the child
  ::execv(arguments[0], arguments);
  ::_exit(127);
}

// Reads both pipes to their ends; false when the time is over first.
bool read_all(const Pipe& out, const Pipe& errors, ChildResult& result, Nanoseconds at_most) {
  const auto deadline = steady_clock().now() + at_most;
  std::array<pollfd, 2> ends{{{out.read, POLLIN, 0}, {errors.read, POLLIN, 0}}};
  std::array<std::string*, 2> texts{&result.output, &result.errors};
  std::array<char, 4096> buffer{};
  while (ends[0].fd >= 0 || ends[1].fd >= 0) {
    const auto left = deadline - steady_clock().now();
    if (left <= Nanoseconds{0}) return false;
    const auto wait = std::chrono::duration_cast<std::chrono::milliseconds>(left).count() + 1;
    if (::poll(ends.data(), ends.size(), static_cast<int>(std::min<long>(wait, 1000))) < 0) {
      if (errno != EINTR) return false;
      continue;
    }
    for (std::size_t i = 0; i < ends.size(); ++i) {
      if (ends[i].fd < 0 || ends[i].revents == 0) continue;
      const auto count = ::read(ends[i].fd, buffer.data(), buffer.size());
      if (count > 0) texts[i]->append(buffer.data(), static_cast<std::size_t>(count));
      if (count == 0 || (count < 0 && errno != EINTR)) ends[i].fd = -1;
    }
  }
  return true;
}

}  // namespace

std::string find_program(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "/usr/bin:/bin" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    const auto candidate = (folder.empty() ? "." : folder) + "/" + program;
    if (::access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return {};
}

ChildResult run_child(const std::vector<std::string>& arguments, Nanoseconds at_most) {
  std::vector<char*> pointers;
  for (const auto& argument : arguments) pointers.push_back(const_cast<char*>(argument.c_str()));
  pointers.push_back(nullptr);
  Pipe out;
  Pipe errors;
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child == 0) become(pointers.data(), out.write, errors.write, parent);
  if (child < 0) {
    throw Error(ErrorCode::unavailable, "starting " + arguments[0] +
                                            " failed: " + std::strerror(errno) +
                                            "; raise the limit of processes (ulimit -u)");
  }
  out.close_write();
  errors.close_write();
  ChildResult result;
  if (!read_all(out, errors, result, at_most)) {
    ::kill(child, SIGKILL);
    result.timed_out = true;
  }
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  result.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

}  // namespace terrace::cli
