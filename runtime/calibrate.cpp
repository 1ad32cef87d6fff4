#include "runtime/calibrate.h"

#include <algorithm>
#include <vector>

#include "nvme/store_geometry.h"
#include "terrace/device.h"
#include "terrace/error.h"
#include "terrace/io_engine.h"
#include "tiers/host_memory.h"
#include "tiers/topology.h"

namespace terrace {
namespace {

constexpr Bytes kCopy = 8_MiB;
constexpr Bytes kTransfer = 4_MiB;
constexpr Bytes kFile = 64_MiB;
constexpr Nanoseconds kEnough = std::chrono::milliseconds(150);  // of measuring one lane
constexpr int kMinRounds = 3;
constexpr int kFlushRounds = 5;

// GB/s of `round`, which moves `bytes`, over as many rounds as fit the time; the first one, which
// touches cold memory, does not count.
template <class Round>
double measure(Bytes bytes, Round&& round) {
  round(0);
  const auto begin = steady_clock().now();
  auto now = begin;
  int rounds = 0;
  while (rounds < kMinRounds || (now - begin < kEnough && rounds < 64)) {
    round(++rounds);
    now = steady_clock().now();
  }
  return static_cast<double>(bytes.count) * rounds / to_seconds(now - begin) / 1e9;
}

void measure_copies(const Config& config, Speeds& speeds) {
  EmulatedDeviceOptions options;
  options.memory = kCopy;
  options.host_to_device = config.throttle.host_to_device;
  options.device_to_host = config.throttle.device_to_host;
  const auto device = make_emulated_device(options);
  const HostMemory host(kCopy, device.get());
  std::byte* memory = device->allocate(kCopy);
  std::vector<Completion> completions;
  speeds.host_to_device_gb_s = measure(kCopy, [&](int) {
    device->copy(kHostToDeviceStream, {Ticket{}, memory, host.span().data(), kCopy});
    device->synchronize(kHostToDeviceStream);
  });
  speeds.device_to_host_gb_s = measure(kCopy, [&](int) {
    device->copy(kDeviceToHostStream, {Ticket{}, host.span().data(), memory, kCopy});
    device->synchronize(kDeviceToHostStream);
  });
  device->poll(completions);
  device->release(memory);
}

void measure_adam(const Config& config, DType gradient_dtype, DType parameter_dtype,
                  Speeds& speeds) {
  constexpr std::uint64_t kElements = 1 << 20;
  std::vector<float> arrays(kElements * 5);
  const auto home = numa_home(detect_topology(), config.numa_node, 0, 1);
  const auto pool = make_adam_pool(
      {config.adam_threads, config.throttle.adam_gb_s, home.ranks, home.cpus});
  const auto scalars = adam_scalars(config.optimizer, config.learning_rate, 1);
  AdamSlice slice;
  slice.gradient = arrays.data();
  slice.gradient_dtype = gradient_dtype;
  slice.master_weight = arrays.data() + kElements;
  slice.momentum = arrays.data() + 2 * kElements;
  slice.variance = arrays.data() + 3 * kElements;
  slice.parameter = arrays.data() + 4 * kElements;
  slice.parameter_dtype = parameter_dtype;
  slice.elements = kElements;
  const Bytes bytes{kElements * adam_bytes_per_element(gradient_dtype, parameter_dtype)};
  speeds.adam_gb_s = measure(bytes, [&](int) {
    pool->submit(Ticket{}, scalars, slice);
    std::vector<Completion> completions;
    while (pool->poll(completions) == 0) {
      steady_clock().sleep_until(steady_clock().now() + std::chrono::microseconds(20));
    }
  });
}

// Reads or writes [0, kFile) in transfers, several at a time.
double measure_file(IoEngine& io, FileId file, IoOperation operation, std::span<std::byte> memory) {
  return measure(kTransfer * 4, [&](int round) {
    std::vector<Completion> completions;
    const Bytes stride = kTransfer * 4;
    const std::uint64_t first =
        static_cast<std::uint64_t>(round) % (kFile.count / stride.count) * stride.count;
    for (std::uint64_t i = 0; i < 4; ++i) {
      TERRACE_CHECK(io.submit({Ticket{i}, operation, file, first + i * kTransfer.count,
                               memory.data() + i * kTransfer.count, kTransfer.count}));
    }
    io.flush();
    while (completions.size() < 4) io.reap(completions, std::chrono::milliseconds(100));
    for (const auto& completion : completions) {
      if (completion.error != 0) {
        throw Error(ErrorCode::io, "measuring the drive behind " + io.file_info(file).path +
                                       " failed with errno " + std::to_string(completion.error));
      }
    }
  });
}

// Milliseconds of a commit's two flushes: each after a page that was written.
double measure_commit(IoEngine& io, FileId file, std::span<std::byte> page) {
  const auto one = [&](IoOperation operation) {
    TERRACE_CHECK(io.submit({Ticket{}, operation, file, 0, page.data(), page.size()}));
    io.flush();
    std::vector<Completion> completions;
    while (completions.empty()) io.reap(completions, std::chrono::milliseconds(100));
  };
  std::vector<double> times;
  for (int round = 0; round < kFlushRounds; ++round) {
    const auto begin = steady_clock().now();
    one(IoOperation::write);
    one(IoOperation::flush);
    times.push_back(to_seconds(steady_clock().now() - begin) * 2e3);
  }
  std::nth_element(times.begin(), times.begin() + kFlushRounds / 2, times.end());
  return times[kFlushRounds / 2];
}

void measure_drive(const Config& config, const std::string& directory, DriveSpeed& drive,
                   double& commit_ms) {
  const auto io = make_io_engine(config.io);
  const FileId file = io->open(
      {.path = directory + "/terrace.measure", .size = kFile, .mode = IoFileMode::scratch});
  const HostMemory memory(kTransfer * 4, nullptr);
  for (std::size_t i = 0; i < memory.span().size(); ++i) {
    memory.span()[i] = static_cast<std::byte>(i * 2654435761U >> 13);
  }
  // Once over the whole file, so that reads find written extents.
  drive.write_gb_s = measure_file(*io, file, IoOperation::write, memory.span());
  for (std::uint64_t offset = 0; offset < kFile.count; offset += kTransfer.count) {
    TERRACE_CHECK(io->submit({Ticket{}, IoOperation::write, file, offset, memory.span().data(),
                              kTransfer.count}));
    io->flush();
    std::vector<Completion> completions;
    while (completions.empty()) io->reap(completions, std::chrono::milliseconds(100));
    if (completions.front().error != 0) throw Error(ErrorCode::io, "the drive refused a write");
  }
  drive.read_gb_s = measure_file(*io, file, IoOperation::read, memory.span());
  commit_ms = std::max(commit_ms, measure_commit(*io, file, memory.span().first(kStorePage.count)));
  io->close(file);
}

void take(std::optional<double> given, double& speed) {
  if (given) speed = *given;
}

// A drive that cannot be measured is planned for with the default speeds; whether it can be used
// shows when the store is opened, if anything is to live there.
void measure_drives(const Config& config, MeasuredSpeeds& measured) {
  const Bytes room = config.budget.nvme.value_or(kFile);
  double commit_ms = 0;
  for (const auto& given : config.nvme) {
    DriveSpeed drive;
    if ((!given.read_gb_s || !given.write_gb_s) && room >= kFile) {
      try {
        measure_drive(config, given.path, drive, commit_ms);
      } catch (const Error&) {
        drive = {};
      }
    }
    take(given.read_gb_s, drive.read_gb_s);
    take(given.write_gb_s, drive.write_gb_s);
    measured.drives.push_back(drive);
  }
  if (commit_ms > 0) measured.speeds.commit_ms = commit_ms;
  combine(measured.drives, stripe_weights(stripe_speeds(measured.drives)), measured.speeds);
}

}  // namespace

MeasuredSpeeds measure_speeds(const Config& config, DType gradient_dtype, DType parameter_dtype) {
  MeasuredSpeeds measured;
  Speeds& speeds = measured.speeds;
  const auto& given = config.speeds;
  if (!given.host_to_device_gb_s || !given.device_to_host_gb_s) measure_copies(config, speeds);
  if (!given.adam_gb_s) measure_adam(config, gradient_dtype, parameter_dtype, speeds);
  take(given.host_to_device_gb_s, speeds.host_to_device_gb_s);
  take(given.device_to_host_gb_s, speeds.device_to_host_gb_s);
  take(given.adam_gb_s, speeds.adam_gb_s);
  take(given.compute_tflops, speeds.compute_tflops);
  if (!config.nvme.empty()) measure_drives(config, measured);
  return measured;
}

}  // namespace terrace
