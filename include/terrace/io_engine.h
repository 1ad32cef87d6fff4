// Port: asynchronous file I/O. Implementations: io_uring, threads, memory, and a throttling
// wrapper.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "terrace/completion.h"
#include "terrace/pacer.h"
#include "terrace/types.h"

namespace terrace {

// flush: makes durable every write to its file whose completion had been collected before the flush
// was submitted. It promises nothing about a write that was in flight then.
enum class IoOperation : std::uint8_t { read, write, flush };

struct IoRequest {
  Ticket ticket;
  IoOperation operation = IoOperation::read;
  FileId file;
  std::uint64_t offset = 0;     // multiple of IoFileInfo::alignment
  std::byte* data = nullptr;    // aligned alike
  std::uint64_t bytes = 0;      // a multiple of it too; any size, the engine splits; flush: ignored
};

enum class IoFileMode : std::uint8_t {
  create,    // a new file; a file of that name is refused. Its name and size survive a power cut
  scratch,   // a new file without a name: nothing is left behind, even after kill -9
  existing,  // a file that is there, as it is: nothing is created, truncated or written by open()
};

// What open() promises about a file.
struct IoFileOptions {
  std::string path;
  Bytes size{};  // create, scratch: reserved on open with fallocate, so that no later write can hit
                 // a full disk. existing: ignored
  IoFileMode mode = IoFileMode::create;
  bool direct = true;       // ask for O_DIRECT; a file system that refuses is used buffered
  std::uint32_t drive = 0;  // below IoEngineOptions::drives; files of one drive share its queue
                            // depth and its throttle
  Bytes keep_free{};        // create, scratch: refused when the file system would have less left
  bool read_only = false;   // existing: what may be read is enough; writes fail
};

struct IoFileInfo {
  std::string path;
  Bytes size;                   // a multiple of the alignment; an existing file's is rounded down
  bool direct = false;          // O_DIRECT is in effect
  std::string direct_note;      // why not, when it is not
  std::uint32_t alignment = 4096;  // of offset, length and address; at least 4096
  std::uint32_t drive = 0;
};

// How an engine works, for `terrace info`, the first line of a run and --json.
struct IoEngineInfo {
  std::string engine;                   // "io_uring", "threads", "memory"
  bool registered_buffers = false;
  bool registered_files = false;
  std::vector<std::string> notes;       // each fallback: what, why and the remedy, one line each
};

inline constexpr std::size_t kMaxIoFiles = 64;

// Thread rule: one owner thread makes every call, construction and destruction included; only
// wake() may come from elsewhere. Completions are collected by reap() and nowhere else.
// An operation completes with all its bytes or with an error: short transfers, EINTR and EAGAIN are
// continued inside; end of file before the last byte of a read is an error (ENODATA).
class IoEngine {
 public:
  virtual ~IoEngine() = default;

  virtual IoEngineInfo info() const = 0;

  // Makes the file (mode 0600) and reserves its space, or finds it, and checks what it can do. When
  // this throws (Error(io): path, bytes, errno, what to do) nothing is left behind.
  virtual FileId open(const IoFileOptions& options) = 0;
  // No operation on the file may be pending. Does not remove the file.
  virtual void close(FileId file) = 0;
  // Whether `path` names a regular file, which is what mode `existing` opens. Error(io) when the
  // system does not tell.
  virtual bool exists(const std::string& path) const = 0;
  // Takes the name away, for good when this returns; what has the file open can go on using it.
  // Error(io) when there is no such file or the system refuses.
  virtual void remove(const std::string& path) = 0;
  virtual IoFileInfo file_info(FileId file) const = 0;

  // Memory that most transfers will use. Optional: a refusal only leaves a note in info().
  virtual void register_buffers(std::span<const std::span<std::byte>> buffers) = 0;

  // Takes a request unless the capacity of its file's drive is exhausted (false: reap first, then
  // try again; at least one request of any size is always taken when none of that drive is
  // pending). The memory belongs to the engine until the completion.
  virtual bool submit(const IoRequest& request) = 0;
  // Makes what was submitted visible to the kernel. submit() alone may only queue.
  virtual void flush() = 0;
  // Requests taken and not yet given back by reap().
  virtual std::size_t pending() const = 0;

  // Appends completions and returns how many. Waits until there is one, wake() was called since the
  // last reap(), or `timeout` has passed (0: does not wait). Other errors are thrown as Error(io).
  virtual std::size_t reap(std::vector<Completion>& completions, Nanoseconds timeout) = 0;
  // Ends the present or the next reap() early. Any thread.
  virtual void wake() = 0;
};

enum class IoEngineKind : std::uint8_t { automatic, io_uring, threads, memory };

std::string_view to_string(IoEngineKind kind);        // "auto", "io_uring", "threads", "memory"
IoEngineKind parse_io_engine(std::string_view text);  // throws Error(invalid_argument)

struct IoEngineOptions {
  IoEngineKind kind = IoEngineKind::automatic;
  std::uint32_t drives = 1;                  // the most that files will name; at most kMaxIoFiles
  std::uint32_t queue_depth = 32;            // transfers handed to the kernel at once, per drive
  Bytes block = 1_MiB;  // larger requests are split into transfers of this size
  std::uint32_t threads = 4;                 // of the thread engine, per drive
  Throttle read;                             // of each drive; active: the engine is wrapped in a
  Throttle write;                            // throttle
};

// automatic: io_uring, or the thread engine where the system refuses it (info().notes says why).
// io_uring asked for by name and refused: Error(unavailable) with reason and remedy.
// Must be called on the thread that will own the engine.
std::unique_ptr<IoEngine> make_io_engine(const IoEngineOptions& options);

}  // namespace terrace
