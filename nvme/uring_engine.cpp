// io_uring: one ring, owned by one thread; every completion is read, every result looked at.
#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <utility>

#include "nvme/deadline.h"
#include "nvme/engines.h"
#include "nvme/file_table.h"
#include "nvme/transfers.h"
#include "terrace/error.h"

namespace terrace {
namespace {

constexpr std::uint64_t kWakeTag = std::uint64_t{1} << 62;  // no slot, and not liburing's own tag
constexpr std::uint64_t kMaxPiece = std::uint64_t{1} << 30;  // the kernel's limit per buffer
constexpr unsigned kMaxPieces = 4096;                        // registered buffers
constexpr Nanoseconds kDrainTurn = std::chrono::milliseconds(100);  // of the destructor's wait

struct SetUp {
  unsigned flags;
  const char* note;
};
// Best first; older kernels know fewer.
constexpr SetUp kLadder[] = {
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, ""},
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN,
     "io_uring runs without deferred task work, a little slower: the kernel is older than 6.1"},
    {0, "io_uring runs without single-issuer mode, a little slower: the kernel is older than 6.0"},
};

// Why io_uring_setup() failed and what helps.
std::string remedy(int error) {
  int disabled = 0;
  std::ifstream("/proc/sys/kernel/io_uring_disabled") >> disabled;
  if (disabled != 0 && error == EPERM) {
    return "/proc/sys/kernel/io_uring_disabled is " + std::to_string(disabled) +
           "; allow it with sysctl -w kernel.io_uring_disabled=0";
  }
  switch (error) {
    case EPERM:
    case EACCES:
      return "a container's seccomp profile forbids it; allow the io_uring_* calls there";
    case ENOSYS:
      return "the kernel (5.11 is needed) or a container's seccomp profile does not have it";
    case ENOMEM: return "raise the locked-memory limit (ulimit -l)";
    case EMFILE:
    case ENFILE: return "raise the limit of open files (ulimit -n)";
    default: return "see the kernel's log";
  }
}

Error refused(const std::string& what, int error) {
  return {ErrorCode::unavailable,
          what + " is refused (" + std::strerror(error) + "): " + remedy(error) +
              ", or choose the I/O engine \"threads\""};
}

// The ring and its eventfd. Thread rule: the engine's owner; only wake() from any thread.
class Ring {
 public:
  // `entries`: the most submissions that are ever queued or in flight.
  explicit Ring(unsigned entries) {
    set_up(entries);
    wake_descriptor_ = ::eventfd(0, EFD_CLOEXEC);
    if (wake_descriptor_ >= 0) return;
    const int error = errno;
    ::io_uring_queue_exit(&ring_);
    throw refused("io_uring's eventfd", error);
  }
  // The kernel takes a ring apart in its own time; files and locked memory are given back at once.
  ~Ring() {
    ::io_uring_unregister_buffers(&ring_);
    ::io_uring_unregister_files(&ring_);
    ::io_uring_queue_exit(&ring_);
    ::close(wake_descriptor_);
  }
  Ring(const Ring&) = delete;

  io_uring* get() { return &ring_; }
  const std::string& note() const { return note_; }

  // There is room: the queue has an entry for every transfer and for the wake read.
  io_uring_sqe* entry() {
    io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
    TERRACE_CHECK(sqe != nullptr);
    return sqe;
  }

  void wake() {
    const std::uint64_t one = 1;
    // The counter cannot overflow and the write cannot block; there is nothing to do on failure.
    [[maybe_unused]] const auto written = ::write(wake_descriptor_, &one, sizeof one);
  }

  // Completes with kWakeTag after the next wake(), or at once when one is unread.
  void post_wake_read() {
    io_uring_sqe* sqe = entry();
    ::io_uring_prep_read(sqe, wake_descriptor_, &wake_count_, sizeof wake_count_, 0);
    ::io_uring_sqe_set_data64(sqe, kWakeTag);
  }

  // What the kernel is too busy to take stays queued for the next call.
  void submit() { accept(::io_uring_submit(&ring_)); }
  // Throws when the ring can be made and not used: a filter may forbid one call and not the other.
  void submit_first() {
    const int result = ::io_uring_submit(&ring_);
    if (result < 0 && !passes(result)) throw refused("io_uring_enter", -result);
  }
  // Where the kernel needs threads of its own (no direct I/O, flushes), as many as may wait.
  void allow_threads(unsigned count) {
    unsigned limits[] = {count, 0};  // 0: as it is
    ::io_uring_register_iowq_max_workers(&ring_, limits);
  }

  // Submits, runs the ring's deferred work and waits for a completion, at most for `wait`.
  void enter(Nanoseconds wait) {
    if (wait <= Nanoseconds{0}) {
      submit();
      accept(::io_uring_get_events(&ring_));
      return;
    }
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(wait);
    __kernel_timespec time{seconds.count(), (wait - seconds).count()};
    io_uring_cqe* first = nullptr;
    accept(::io_uring_submit_and_wait_timeout(&ring_, &first, 1, &time, nullptr));
  }

 private:
  void set_up(unsigned entries) {
    int result = 0;
    for (const auto& step : kLadder) {
      result = ::io_uring_queue_init(entries, &ring_, step.flags);
      if (result == 0) note_ = step.note;
      if (result != -EINVAL) break;
    }
    if (result != 0) throw refused("io_uring", -result);
    if ((ring_.features & IORING_FEAT_EXT_ARG) != 0) return;  // waits with a timeout
    ::io_uring_queue_exit(&ring_);
    throw refused("io_uring", ENOSYS);
  }

  static bool passes(int error) {
    return error == -EAGAIN || error == -EBUSY || error == -EINTR || error == -ETIME;
  }
  static void accept(int result) {
    if (result >= 0 || passes(result)) return;
    throw Error(ErrorCode::io, std::string("io_uring_enter failed: ") + std::strerror(-result) +
                                   "; choose the I/O engine \"threads\"");
  }

  io_uring ring_{};
  std::string note_;
  int wake_descriptor_ = -1;
  std::uint64_t wake_count_ = 0;  // where the posted read puts the counter
};

class UringEngine final : public IoEngine {
 public:
  explicit UringEngine(const IoEngineOptions& options)
      : table_(options.queue_depth, options.block, options.drives),
        ring_(table_.capacity() + 1),
        files_(table_.drives()) {
    if (!ring_.note().empty()) notes_.push_back(ring_.note());
    const int files =
        ::io_uring_register_files_sparse(ring_.get(), static_cast<unsigned>(kMaxIoFiles));
    files_registered_ = files == 0;
    if (files != 0) note_files(-files);
    buffer_table_ = ::io_uring_register_buffers_sparse(ring_.get(), kMaxPieces);
    ring_.allow_threads(table_.capacity());
    post_wake_read();
    ring_.submit_first();
  }

  // Waits for what is in flight, the wake read included: the kernel owns that memory.
  ~UringEngine() override {
    closing_ = true;
    ring_.wake();
    std::vector<Completion> ignored;
    while (table_.pending() > 0 || wake_posted_) reap(ignored, kDrainTurn);
  }

  IoEngineInfo info() const override {
    return {"io_uring", !buffers_.empty(), files_registered_, files_.add_notes(notes_)};
  }

  FileId open(const IoFileOptions& options) override {
    const FileId file = files_.open(options);
    const int descriptor = files_.at(file).descriptor();
    if (!files_registered_) return file;
    const int result =
        ::io_uring_register_files_update(ring_.get(), file.value, &descriptor, 1);
    files_registered_ = result == 1;
    if (!files_registered_) note_files(-result);
    return file;
  }

  void close(FileId file) override {
    TERRACE_CHECK(!table_.uses(file));
    const int none = -1;
    // A refusal only keeps the file's space until the slot is used again.
    if (files_registered_) ::io_uring_register_files_update(ring_.get(), file.value, &none, 1);
    files_.close(file);
  }

  IoFileInfo file_info(FileId file) const override { return files_.at(file).info(); }
  bool exists(const std::string& path) const override { return file_exists(path); }
  void remove(const std::string& path) override { remove_file(path); }

  // Piece by piece, so that what fits under the locked-memory limit is registered.
  void register_buffers(std::span<const std::span<std::byte>> buffers) override {
    std::vector<iovec> refused_pieces;
    int error = -buffer_table_;
    for (const auto buffer : buffers) {
      for (std::size_t done = 0; done < buffer.size(); done += kMaxPiece) {
        const iovec piece{buffer.data() + done,
                          std::min<std::size_t>(kMaxPiece, buffer.size() - done)};
        if (error == 0) error = register_piece(piece);
        if (error != 0) refused_pieces.push_back(piece);
      }
    }
    if (error != 0 && !refused_pieces.empty()) note_buffers(refused_pieces, error);
  }

  bool submit(const IoRequest& request) override {
    return table_.submit(request, files_.at(request.file).info());
  }

  void flush() override {
    start_transfers();
    ring_.submit();
  }

  std::size_t pending() const override { return table_.pending(); }

  std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) override {
    const auto deadline = deadline_after(steady_clock().now(), timeout);
    for (;;) {
      // 1. Hand over what waits for a slot.
      start_transfers();
      // 2. Enter the kernel, and wait there unless there is something to give back.
      const auto now = steady_clock().now();
      ring_.enter(table_.has_completed() ? Nanoseconds{0} : deadline - now);
      // 3. Read every completion.
      drain_completions();
      if (table_.has_completed() || woken_ || now >= deadline) break;
    }
    woken_ = false;
    // 4. Slots that became free are filled before the caller goes on.
    flush();
    return table_.collect(completions);
  }

  void wake() override { ring_.wake(); }

 private:
  void note_files(int error) {
    notes_.push_back("files are not registered with the ring (" +
                     std::string(std::strerror(error)) +
                     "), a little slower: kernel 5.19 and 64 open files (ulimit -n) are needed");
  }

  // 0 or an errno value.
  int register_piece(iovec piece) {
    if (buffers_.size() == kMaxPieces) return E2BIG;
    const auto index = static_cast<unsigned>(buffers_.size());
    const __u64 tag = 0;
    const int result = ::io_uring_register_buffers_update_tag(ring_.get(), index, &piece, &tag, 1);
    if (result != 1) return result < 0 ? -result : EINVAL;
    buffers_.push_back(piece);
    return 0;
  }

  void note_buffers(const std::vector<iovec>& pieces, int error) {
    std::uint64_t need = 0;
    for (const auto& piece : pieces) need += piece.iov_len;
    rlimit limit{};
    ::getrlimit(RLIMIT_MEMLOCK, &limit);
    const std::string limit_text =
        limit.rlim_cur == RLIM_INFINITY ? "unlimited" : to_string(Bytes{limit.rlim_cur});
    const std::string advice = error == ENOMEM ? "raise it (ulimit -l) by what is wanted"
                                               : "kernel 5.19 is needed";
    notes_.push_back(to_string(Bytes{need}) + " of buffers are not registered with the ring (" +
                     std::strerror(error) + "), a little slower: the locked-memory limit is " +
                     limit_text + "; " + advice);
  }

  void post_wake_read() {
    ring_.post_wake_read();
    wake_posted_ = true;
  }

  void start_transfers() {
    const auto now = steady_clock().now();
    for (int slot = table_.next(now); slot >= 0; slot = table_.next(now)) prepare(slot);
  }

  // The registered buffer that holds the whole transfer, or -1.
  int buffer_of(const Transfer& transfer) const {
    const auto* first = transfer.data;
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      const auto* base = static_cast<const std::byte*>(buffers_[i].iov_base);
      if (first >= base && first + transfer.bytes <= base + buffers_[i].iov_len) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  void prepare(int slot) {
    const auto& transfer = table_.at(slot);
    io_uring_sqe* sqe = ring_.entry();
    const int file = files_registered_ ? static_cast<int>(transfer.file.value)
                                       : files_.at(transfer.file).descriptor();
    const auto bytes = static_cast<unsigned>(transfer.bytes);
    const int buffer = buffer_of(transfer);
    if (transfer.operation == IoOperation::flush) {
      ::io_uring_prep_fsync(sqe, file, IORING_FSYNC_DATASYNC);
    } else if (transfer.operation == IoOperation::read) {
      if (buffer >= 0) {
        ::io_uring_prep_read_fixed(sqe, file, transfer.data, bytes, transfer.offset, buffer);
      } else {
        ::io_uring_prep_read(sqe, file, transfer.data, bytes, transfer.offset);
      }
    } else if (buffer >= 0) {
      ::io_uring_prep_write_fixed(sqe, file, transfer.data, bytes, transfer.offset, buffer);
    } else {
      ::io_uring_prep_write(sqe, file, transfer.data, bytes, transfer.offset);
    }
    if (files_registered_) ::io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
    ::io_uring_sqe_set_data64(sqe, static_cast<std::uint64_t>(slot));
  }

  void drain_completions() {
    std::array<io_uring_cqe*, 32> entries{};
    const auto now = steady_clock().now();
    for (;;) {
      const unsigned count =
          ::io_uring_peek_batch_cqe(ring_.get(), entries.data(), entries.size());
      if (count == 0) return;
      for (unsigned i = 0; i < count; ++i) take(entries[i]->user_data, entries[i]->res, now);
      ::io_uring_cq_advance(ring_.get(), count);
    }
  }

  void take(std::uint64_t tag, std::int64_t result, Nanoseconds now) {
    if (tag == kWakeTag) {
      woken_ = true;
      wake_posted_ = false;
      if (!closing_) post_wake_read();
      return;
    }
    const int slot = static_cast<int>(tag);
    if (settle(table_, files_, slot, result, now)) prepare(slot);
  }

  TransferTable table_;
  Ring ring_;
  FileTable files_;
  bool woken_ = false;
  bool wake_posted_ = false;
  bool closing_ = false;  // the wake read is not posted again
  bool files_registered_ = false;
  int buffer_table_ = 0;        // the result of making room for registered buffers
  std::vector<iovec> buffers_;  // registered, by index
  std::vector<std::string> notes_;
};

}  // namespace

std::unique_ptr<IoEngine> make_uring_engine(const IoEngineOptions& options) {
  return std::make_unique<UringEngine>(options);
}

}  // namespace terrace
