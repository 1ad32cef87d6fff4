// io_uring: one ring, owned by one thread; every completion is read, every result looked at.
#include <liburing.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "nvme/engines.h"
#include "nvme/file_table.h"
#include "nvme/transfers.h"

namespace terrace {
namespace {

constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};
constexpr std::uint64_t kMaxRegistered = std::uint64_t{1} << 30;  // the kernel's limit per buffer

struct SetUp {
  unsigned flags;
  const char* name;
};
// Best first; older kernels know fewer.
constexpr SetUp kLadder[] = {
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, ""},
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN,
     "the kernel knows no deferred task running (6.1 does)"},
    {0, "the kernel knows no single-issuer rings (6.0 does)"},
};

std::string remedy(int error) {
  switch (error) {
    case EPERM:
    case EACCES:
      return "the system forbids it: allow io_uring in the container's seccomp profile and set "
             "/proc/sys/kernel/io_uring_disabled to 0";
    case ENOSYS: return "the kernel or the container's seccomp profile has no io_uring";
    case ENOMEM: return "raise the locked-memory limit (ulimit -l)";
    default: return "see the kernel's log";
  }
}

class UringEngine final : public IoEngine {
 public:
  explicit UringEngine(const IoEngineOptions& options)
      : table_(std::max(1U, options.queue_depth), options.block) {
    set_up(std::max(1U, options.queue_depth));
    wake_descriptor_ = ::eventfd(0, EFD_CLOEXEC);
    if (wake_descriptor_ < 0) {
      ::io_uring_queue_exit(&ring_);
      throw Error(ErrorCode::unavailable, std::string("eventfd: ") + std::strerror(errno));
    }
    files_registered_ =
        ::io_uring_register_files_sparse(&ring_, static_cast<unsigned>(kMaxIoFiles)) == 0;
    if (!files_registered_) notes_.push_back("files are not registered with the ring");
    post_wake_read();
  }

  // Waits for what is in flight: the kernel owns that memory.
  ~UringEngine() override {
    std::vector<Completion> ignored;
    while (table_.pending() > 0) reap(ignored, std::chrono::milliseconds(100));
    ::io_uring_queue_exit(&ring_);
    ::close(wake_descriptor_);
  }

  IoEngineInfo info() const override {
    return {"io_uring", !buffers_.empty(), files_registered_, notes_};
  }

  FileId open(const IoFileOptions& options) override {
    const FileId file = files_.open(options);
    const int descriptor = files_.at(file).descriptor();
    if (files_registered_ &&
        ::io_uring_register_files_update(&ring_, file.value, &descriptor, 1) != 1) {
      files_registered_ = false;
      notes_.push_back("files are not registered with the ring");
    }
    return file;
  }

  void close(FileId file) override {
    const int none = -1;
    if (files_registered_) ::io_uring_register_files_update(&ring_, file.value, &none, 1);
    files_.close(file);
  }

  IoFileInfo file_info(FileId file) const override { return files_.at(file).info(); }

  void register_buffers(std::span<const std::span<std::byte>> buffers) override {
    std::vector<iovec> pieces;
    for (const auto buffer : buffers) {
      for (std::size_t done = 0; done < buffer.size(); done += kMaxRegistered) {
        pieces.push_back({buffer.data() + done,
                          std::min<std::size_t>(kMaxRegistered, buffer.size() - done)});
      }
    }
    const int result =
        ::io_uring_register_buffers(&ring_, pieces.data(), static_cast<unsigned>(pieces.size()));
    if (result == 0) {
      buffers_ = std::move(pieces);
      return;
    }
    notes_.push_back(refused_buffers(pieces, -result));
  }

  bool submit(const IoRequest& request) override {
    return table_.submit(request, files_.at(request.file).info().alignment);
  }

  void flush() override {
    start_transfers();
    submit_entries();
  }

  std::size_t pending() const override { return table_.pending(); }

  std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) override {
    const auto deadline = steady_clock().now() + timeout;
    for (;;) {
      start_transfers();
      const auto now = steady_clock().now();
      const bool wait = !table_.has_completed() && !woken_ && now < deadline;
      enter(wait ? deadline - now : Nanoseconds{0});
      drain_completions();
      if (table_.has_completed() || woken_ || steady_clock().now() >= deadline) break;
    }
    woken_ = false;
    start_transfers();
    submit_entries();
    return table_.collect(completions);
  }

  void wake() override {
    const std::uint64_t one = 1;
    // The counter cannot overflow and the write cannot block; there is nothing to do on failure.
    [[maybe_unused]] const auto written = ::write(wake_descriptor_, &one, sizeof one);
  }

 private:
  void set_up(std::uint32_t depth) {
    int result = 0;
    for (const auto& step : kLadder) {
      result = ::io_uring_queue_init(depth + 1, &ring_, step.flags);
      if (result == 0) {
        if (*step.name != '\0') notes_.push_back(step.name);
        return;
      }
      if (result != -EINVAL) break;
    }
    throw Error(ErrorCode::unavailable, std::string("io_uring is refused (") +
                                            std::strerror(-result) + "): " + remedy(-result));
  }

  static std::string refused_buffers(const std::vector<iovec>& pieces, int error) {
    std::uint64_t need = 0;
    for (const auto& piece : pieces) need += piece.iov_len;
    rlimit limit{};
    ::getrlimit(RLIMIT_MEMLOCK, &limit);
    return "buffers are not registered with the ring (" + std::string(std::strerror(error)) +
           "): " + to_string(Bytes{need}) + " wanted, the locked-memory limit is " +
           to_string(Bytes{limit.rlim_cur}) + "; raise it with ulimit -l";
  }

  io_uring_sqe* entry() {
    io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
    if (sqe == nullptr) {
      submit_entries();
      sqe = ::io_uring_get_sqe(&ring_);
    }
    TERRACE_CHECK(sqe != nullptr);  // the queue has room for every slot and the wake read
    return sqe;
  }

  void post_wake_read() {
    io_uring_sqe* sqe = entry();
    ::io_uring_prep_read(sqe, wake_descriptor_, &wake_count_, sizeof wake_count_, 0);
    ::io_uring_sqe_set_data64(sqe, kWakeTag);
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
    io_uring_sqe* sqe = entry();
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

  // The kernel may be too busy to take everything at once; what it left stays queued for the next
  // call.
  void submit_entries() {
    const int result = ::io_uring_submit(&ring_);
    if (result < 0) refuse_unless_busy(-result);
  }

  static void refuse_unless_busy(int error) {
    if (error == EAGAIN || error == EBUSY || error == EINTR || error == ETIME) return;
    throw Error(ErrorCode::io, std::string("io_uring_enter failed: ") + std::strerror(error));
  }

  // Submits, runs the ring's deferred work and waits for one completion.
  void enter(Nanoseconds wait) {
    if (wait <= Nanoseconds{0}) {
      submit_entries();
      ::io_uring_get_events(&ring_);
      return;
    }
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(wait);
    __kernel_timespec time{seconds.count(), (wait - seconds).count()};
    io_uring_cqe* first = nullptr;
    const int result = ::io_uring_submit_and_wait_timeout(&ring_, &first, 1, &time, nullptr);
    if (result < 0) refuse_unless_busy(-result);
  }

  void drain_completions() {
    std::array<io_uring_cqe*, 32> entries{};
    const auto now = steady_clock().now();
    for (;;) {
      const unsigned count = ::io_uring_peek_batch_cqe(&ring_, entries.data(), entries.size());
      if (count == 0) return;
      for (unsigned i = 0; i < count; ++i) settle(entries[i]->user_data, entries[i]->res, now);
      ::io_uring_cq_advance(&ring_, count);
    }
  }

  void settle(std::uint64_t tag, std::int64_t result, Nanoseconds now) {
    if (tag == kWakeTag) {
      woken_ = true;
      post_wake_read();
      return;
    }
    const int slot = static_cast<int>(tag);
    const auto alignment = files_.at(table_.at(slot).file).info().alignment;
    if (table_.advance(slot, result, alignment, now)) prepare(slot);
  }

  io_uring ring_{};
  int wake_descriptor_ = -1;
  std::uint64_t wake_count_ = 0;  // where the posted read puts the counter
  bool woken_ = false;
  TransferTable table_;
  FileTable files_;
  bool files_registered_ = false;
  std::vector<iovec> buffers_;  // registered, by index
  std::vector<std::string> notes_;
};

}  // namespace

std::unique_ptr<IoEngine> make_uring_engine(const IoEngineOptions& options) {
  return std::make_unique<UringEngine>(options);
}

}  // namespace terrace
