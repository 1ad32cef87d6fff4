// A file system that fails on demand, under engines with real files: a FUSE mount of one directory.
// Needs root and /dev/fuse.
#pragma once

#include <fcntl.h>
#include <linux/fuse.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/contract/io_engine_contract.h"

namespace terrace {

// What it does to reads and writes; shared with the server's process. The numbers of a test are set
// while nothing is in flight.
struct FaultOrders {
  std::atomic<int> error{0};             // of the calls below; 0: all succeed
  std::atomic<bool> direct_only{false};  // those through a descriptor with O_DIRECT
  std::atomic<bool> writes_only{false};
  std::atomic<std::uint64_t> from{0};    // those at this offset or after it
  std::atomic<int> pass_first{0};        // of those, how many still succeed
  std::atomic<int> pass_every{0};        // every n-th of those succeeds; 0: none
  std::atomic<bool> shorten{false};      // all calls, to 4 KiB and more, unaligned
  std::atomic<std::uint64_t> end{~std::uint64_t{0}};  // reads here or after it find nothing
  std::atomic<bool> hang{false};         // no call is answered, no fsync either
  std::atomic<std::uint64_t> calls{0};   // counted
};

// The server is a process of its own, which ends by itself after a minute: a test that hangs, or is
// killed, while the kernel waits for an answer would otherwise never go away. Made before anything
// that has threads or files; what has files here is destroyed first. Thread rule: the test's.
class FaultyFileSystem {
 public:
  // plain: every transfer is direct, and its result is told as it is. Otherwise the kernel makes
  // something else of short results, and whoever submits to io_uring is not held up.
  explicit FaultyFileSystem(bool plain = false) : plain_(plain) {
    void* shared = ::mmap(nullptr, sizeof(FaultOrders), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) throw std::runtime_error("mmap failed");
    orders_ = new (shared) FaultOrders;
    const int descriptor = ::open("/dev/fuse", O_RDWR | O_CLOEXEC | O_NONBLOCK);
    const std::string data = "fd=" + std::to_string(descriptor) +
                             ",rootmode=40000,user_id=0,group_id=0,allow_other";
    if (descriptor < 0 || ::mount("terrace-test", directory_.path().c_str(), "fuse",
                                  MS_NOSUID | MS_NODEV, data.c_str()) != 0) {
      refusal_ = std::string("mounting FUSE: ") + std::strerror(errno) + " (needs root)";
    } else {
      server_ = ::fork();
      if (server_ == 0) serve(descriptor);
    }
    if (descriptor >= 0) ::close(descriptor);  // the server's alone: it ends with the server
  }
  ~FaultyFileSystem() {
    if (server_ > 0) {
      ::umount2(directory_.path().c_str(), MNT_DETACH);
      ::kill(server_, SIGKILL);
      ::waitpid(server_, nullptr, 0);
    }
    ::munmap(orders_, sizeof(FaultOrders));
  }
  FaultyFileSystem(const FaultyFileSystem&) = delete;

  const std::string& refusal() const { return refusal_; }
  std::string operator/(const std::string& name) const { return directory_ / name; }
  FaultOrders& orders() { return *orders_; }
  // No faults from now on.
  void relent() {
    orders_->~FaultOrders();
    new (orders_) FaultOrders;
  }

 private:
  struct File {
    std::vector<char> data;
    std::uint64_t links = 1;
  };
  struct Request {
    fuse_in_header header;
    const char* body = nullptr;
    template <class T>
    T as() const {
      T value;
      std::memcpy(&value, body, sizeof value);
      return value;
    }
  };

  [[noreturn]] void serve(int descriptor) {
    descriptor_ = descriptor;
    std::vector<char> buffer(kMaxWrite + kPage);
    const auto deadline = steady_clock().now() + kLongestTest;
    while (steady_clock().now() < deadline) {
      pollfd wait{descriptor_, POLLIN, 0};
      if (::poll(&wait, 1, 100) <= 0) continue;
      const auto got = ::read(descriptor_, buffer.data(), buffer.size());
      if (got < 0 && errno == ENODEV) break;  // unmounted
      if (got < static_cast<ssize_t>(sizeof(fuse_in_header))) continue;
      Request request;
      std::memcpy(&request.header, buffer.data(), sizeof request.header);
      request.body = buffer.data() + sizeof request.header;
      handle(request);
    }
    std::_Exit(0);
  }

  void handle(const Request& request) {
    const auto node = request.header.nodeid;
    switch (request.header.opcode) {
      case FUSE_INIT: return init(request);
      case FUSE_LOOKUP: return look_up(request);
      case FUSE_GETATTR: return attributes(request);
      case FUSE_SETATTR: return set_attributes(request);
      case FUSE_CREATE: return create(request);
      case FUSE_UNLINK: return remove(request);
      case FUSE_OPEN:
      case FUSE_OPENDIR: return answer(request, fuse_open_out{node, open_flags(), 0});
      case FUSE_READ: return read(request);
      case FUSE_WRITE: return write(request);
      case FUSE_FALLOCATE: {
        const auto in = request.as<fuse_fallocate_in>();
        files_[node].data.resize(in.offset + in.length);
        return fail(request, 0);
      }
      case FUSE_STATFS: {
        fuse_statfs_out out{};
        out.st.bsize = out.st.frsize = kPage;
        out.st.blocks = out.st.bfree = out.st.bavail = 1 << 20;
        return answer(request, out);
      }
      case FUSE_FSYNC:
        hang();
        return fail(request, 0);
      case FUSE_FLUSH:
      case FUSE_RELEASE:
      case FUSE_RELEASEDIR:
      case FUSE_FSYNCDIR: return fail(request, 0);
      case FUSE_FORGET:
      case FUSE_BATCH_FORGET:
      case FUSE_INTERRUPT: return;  // want no answer
      default: return fail(request, ENOSYS);
    }
  }

  std::uint32_t open_flags() const { return plain_ ? std::uint32_t{FOPEN_DIRECT_IO} : 0; }

  void init(const Request& request) {
    fuse_init_out out{};
    out.major = FUSE_KERNEL_VERSION;
    out.minor = 31;
    out.max_readahead = kMaxWrite;
    out.flags = FUSE_ASYNC_READ | FUSE_BIG_WRITES | FUSE_MAX_PAGES;
    if (!plain_) out.flags |= FUSE_ASYNC_DIO;
    out.max_background = 64;
    out.congestion_threshold = 48;
    out.max_write = kMaxWrite;
    out.max_pages = kMaxWrite / kPage;
    out.time_gran = 1;
    answer(request, out);
  }

  fuse_attr attributes_of(std::uint64_t node) {
    fuse_attr out{};
    out.ino = node;
    out.mode = node == FUSE_ROOT_ID ? S_IFDIR | 0755 : S_IFREG | 0600;
    out.nlink = 1;
    out.blksize = kPage;
    if (node != FUSE_ROOT_ID) out.size = files_[node].data.size();
    return out;
  }
  fuse_entry_out entry_of(std::uint64_t node) {
    fuse_entry_out out{};
    out.nodeid = node;
    out.attr = attributes_of(node);
    return out;
  }

  void look_up(const Request& request) {
    const auto found = names_.find(request.body);
    if (found == names_.end()) return fail(request, ENOENT);
    answer(request, entry_of(found->second));
  }
  void attributes(const Request& request) {
    fuse_attr_out out{};
    out.attr = attributes_of(request.header.nodeid);
    answer(request, out);
  }
  void set_attributes(const Request& request) {
    const auto in = request.as<fuse_setattr_in>();
    if ((in.valid & FATTR_SIZE) != 0) files_[request.header.nodeid].data.resize(in.size);
    attributes(request);
  }
  void create(const Request& request) {
    const auto node = ++last_node_;
    names_[request.body + sizeof(fuse_create_in)] = node;
    files_[node] = {};
    struct {
      fuse_entry_out entry;
      fuse_open_out open;
    } out{entry_of(node), {node, open_flags(), 0}};
    answer(request, out);
  }
  void remove(const Request& request) {
    fail(request, names_.erase(request.body) == 1 ? 0 : ENOENT);
  }

  struct Verdict {
    int error = 0;
    std::uint32_t most = 0;  // bytes moved
  };
  void hang() const {
    const auto deadline = steady_clock().now() + kLongestTest / 2;
    while (orders_->hang && steady_clock().now() < deadline) ::usleep(1000);
  }
  Verdict judge(bool write, std::uint32_t flags, std::uint64_t offset, std::uint32_t bytes) {
    auto& o = *orders_;
    hang();
    const auto call = ++o.calls;
    const bool concerned = o.error != 0 && (!o.direct_only || (flags & O_DIRECT) != 0) &&
                           (!o.writes_only || write) && offset >= o.from;
    const bool passes = o.pass_first > 0 ? o.pass_first-- > 0
                                         : o.pass_every > 0 && ++concerned_ % o.pass_every == 0;
    if (concerned && !passes) return {o.error, 0};
    if (!write && offset >= o.end) return {0, 0};
    const auto part = static_cast<std::uint32_t>(kPage + call * 2477 % kPage * 4 + call % 100);
    return {0, o.shorten ? std::min(bytes, part) : bytes};
  }

  void read(const Request& request) {
    const auto in = request.as<fuse_read_in>();
    const auto& data = files_[request.header.nodeid].data;
    const auto verdict = judge(false, in.flags, in.offset, in.size);
    if (verdict.error != 0) return fail(request, verdict.error);
    const auto first = std::min<std::uint64_t>(in.offset, data.size());
    const auto bytes = std::min<std::uint64_t>({in.size, verdict.most, data.size() - first});
    reply(request, 0, data.data() + first, bytes);
  }
  void write(const Request& request) {
    const auto in = request.as<fuse_write_in>();
    auto& data = files_[request.header.nodeid].data;
    const auto verdict = judge(true, in.flags, in.offset, in.size);
    if (verdict.error != 0) return fail(request, verdict.error);
    const auto bytes = std::min(in.size, verdict.most);
    if (data.size() < in.offset + bytes) data.resize(in.offset + bytes);
    std::memcpy(data.data() + in.offset, request.body + sizeof in, bytes);
    answer(request, fuse_write_out{bytes, 0});
  }

  template <class T>
  void answer(const Request& request, const T& out) {
    reply(request, 0, &out, sizeof out);
  }
  void fail(const Request& request, int error) { reply(request, error, nullptr, 0); }
  void reply(const Request& request, int error, const void* data, std::size_t bytes) {
    std::vector<char> out(sizeof(fuse_out_header) + bytes);
    const fuse_out_header header{static_cast<std::uint32_t>(out.size()), -error,
                                 request.header.unique};
    std::memcpy(out.data(), &header, sizeof header);
    if (bytes > 0) std::memcpy(out.data() + sizeof header, data, bytes);
    [[maybe_unused]] const auto written = ::write(descriptor_, out.data(), out.size());
  }

  static constexpr std::uint32_t kMaxWrite = 1 << 20;
  static constexpr Nanoseconds kLongestTest = std::chrono::seconds(60);

  const bool plain_;
  TemporaryDirectory directory_;
  std::string refusal_;
  FaultOrders* orders_ = nullptr;
  pid_t server_ = -1;
  // The server's.
  int descriptor_ = -1;
  int concerned_ = 0;
  std::map<std::string, std::uint64_t> names_;
  std::map<std::uint64_t, File> files_;
  std::uint64_t last_node_ = FUSE_ROOT_ID;
};

}  // namespace terrace
