// The bandwidth of Adam beside that of plain loops with the same number of threads. Everything is
// measured in turn, round after round, so that what else the machine does hits all alike.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "terrace/adam.h"

namespace terrace {
namespace {

// In huge pages where the system has them, as in the engine.
class Floats {
 public:
  Floats(std::size_t elements, float value) : bytes_(elements * sizeof(float)) {
    void* const memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    ::madvise(memory, bytes_, MADV_HUGEPAGE);
    data_ = static_cast<float*>(memory);
    std::fill(data_, data_ + elements, value);
  }
  ~Floats() { ::munmap(data_, bytes_); }
  Floats(const Floats&) = delete;
  Floats& operator=(const Floats&) = delete;

  float* data() { return data_; }
  float& operator[](std::size_t i) { return data_[i]; }
  std::size_t size() const { return bytes_ / sizeof(float); }

 private:
  std::size_t bytes_;
  float* data_;
};

struct Arrays {
  Floats weight, momentum, variance;
  Floats gradient, parameter;  // the first half serves as bf16

  explicit Arrays(std::size_t elements)
      : weight(elements, 0.5F), momentum(elements, 0.0F), variance(elements, 0.0F),
        gradient(elements, 0.001F), parameter(elements, 0.5F) {}

  AdamSlice slice(DType dtype) {
    return {.gradient = gradient.data(), .gradient_dtype = dtype, .master_weight = weight.data(),
            .momentum = momentum.data(), .variance = variance.data(),
            .parameter = parameter.data(), .parameter_dtype = dtype, .elements = weight.size()};
  }
};

// body(first, end) on `threads` threads, each with its share of `elements`.
void share(int threads, std::size_t elements,
           const std::function<void(std::size_t, std::size_t)>& body) {
  std::vector<std::thread> others;
  const auto n = static_cast<std::size_t>(threads);
  for (std::size_t t = 1; t < n; ++t) {
    others.emplace_back(body, elements * t / n, elements * (t + 1) / n);
  }
  body(0, elements / n);
  for (auto& thread : others) thread.join();
}

void triad(float* a, const float* b, const float* c, std::size_t elements) {
  for (std::size_t i = 0; i < elements; ++i) a[i] = b[i] + 0.25F * c[i];
}

// Like Adam, and unlike a copy, it writes where it reads.
void scale(float* a, std::size_t elements) {
  for (std::size_t i = 0; i < elements; ++i) a[i] = a[i] * 0.9999F;
}

double sum(const float* a, std::size_t elements) {
  double lanes[16] = {};
  for (std::size_t i = 0; i + 16 <= elements; i += 16) {
    for (std::size_t j = 0; j < 16; ++j) lanes[j] += static_cast<double>(a[i + j]);
  }
  double total = 0;
  for (const double lane : lanes) total += lane;
  return total;
}

struct Measurement {
  std::string name;
  double bytes;
  std::function<void()> run;
  std::vector<double> gb_s{};

  void measure() {
    const auto start = std::chrono::steady_clock::now();
    run();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    gb_s.push_back(bytes / took.count() * 1e-9);
  }
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void run_to_end(AdamPool& pool) { static_cast<void>(pool.wait()); }

std::vector<Measurement> plain_loops(Arrays& x, int threads) {
  const std::size_t n = x.weight.size();
  const auto bytes = static_cast<double>(n * sizeof(float));
  return {{"copy (memcpy)", 2 * bytes, [&x, n, threads] {
             share(threads, n, [&x](std::size_t first, std::size_t end) {
               std::memcpy(&x.parameter[first], &x.gradient[first], (end - first) * 4);
             });
           }},
          {"triad a = b + s c", 3 * bytes, [&x, n, threads] {
             share(threads, n, [&x](std::size_t first, std::size_t end) {
               triad(&x.parameter[first], &x.weight[first], &x.gradient[first], end - first);
             });
           }},
          {"in place a = s a", 2 * bytes, [&x, n, threads] {
             share(threads, n, [&x](std::size_t first, std::size_t end) {
               scale(&x.weight[first], end - first);
             });
           }},
          {"read (sum)", bytes, [&x, n, threads] {
             share(threads, n, [&x](std::size_t first, std::size_t end) {
               const volatile double kept = sum(&x.weight[first], end - first);
               static_cast<void>(kept);
             });
           }}};
}

std::vector<Measurement> adam_jobs(Arrays& x, AdamPool& pool) {
  std::vector<Measurement> jobs;
  const auto scalars = adam_scalars({.weight_decay = 0.1}, 1e-4, 10);
  const auto elements = static_cast<double>(x.weight.size());
  for (const auto dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    const auto name = std::string(to_string(dtype));
    jobs.push_back({"Adam, " + name,
                    elements * static_cast<double>(adam_bytes_per_element(dtype, dtype)),
                    [&x, &pool, scalars, dtype] {
                      pool.submit({1}, scalars, x.slice(dtype));
                      run_to_end(pool);
                    }});
    jobs.push_back({"sum of squares, " + name,
                    elements * static_cast<double>(size_of(dtype).count),
                    [&x, &pool, dtype,
                     leaves = std::vector<double>(leaves_of(x.weight.size()))]() mutable {
                      pool.submit_gradients({1}, {{x.gradient.data(), dtype, x.weight.size()},
                                                  {{0, x.weight.size()}}, leaves.data()});
                      run_to_end(pool);
                    }});
  }
  return jobs;
}

void report(const std::vector<Measurement>& all) {
  std::printf("%-24s %12s %12s %14s %14s\n", "GB/s", "median", "best", "of copy", "of in place");
  for (const auto& m : all) {
    std::vector<double> of_copy, of_scale;  // round by round: both saw the same machine
    for (std::size_t i = 0; i < m.gb_s.size(); ++i) {
      of_copy.push_back(m.gb_s[i] / all[0].gb_s[i]);
      of_scale.push_back(m.gb_s[i] / all[2].gb_s[i]);
    }
    std::printf("%-24s %12.2f %12.2f %14.2f %14.2f\n", m.name.c_str(), median(m.gb_s),
                *std::max_element(m.gb_s.begin(), m.gb_s.end()), median(of_copy),
                median(of_scale));
  }
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  using namespace terrace;
  const std::size_t mib = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 256;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 15;
  const int cores = make_adam_pool({})->threads();
  Arrays arrays(mib << 18);
  for (int threads = 1;; threads = std::min(2 * threads, cores)) {
    const auto pool = make_adam_pool({.threads = threads});
    auto all = plain_loops(arrays, threads);
    for (auto& job : adam_jobs(arrays, *pool)) all.push_back(std::move(job));
    for (int round = 0; round < rounds; ++round) {
      for (auto& measurement : all) measurement.measure();
    }
    std::printf("\n%s, %zu MiB arrays, %d rounds, %d threads\n", adam_instruction_set().c_str(),
                mib, rounds, threads);
    report(all);
    if (threads == cores) return 0;
  }
}
