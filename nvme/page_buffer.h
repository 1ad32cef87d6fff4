// Memory for what a store writes about itself.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <span>

#include "nvme/store_geometry.h"

namespace terrace {

// Zeroed pages. Thread rule: that of a vector.
class PageBuffer {
 public:
  PageBuffer() = default;
  explicit PageBuffer(Bytes size) : size_(round_up(size, kStorePage).count) {
    if (size_ == 0) return;
    data_.reset(static_cast<std::byte*>(std::aligned_alloc(kStorePage.count, size_)));
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_.get(), 0, size_);
  }
  std::byte* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  // Never frees it: something may still write to it.
  void abandon() { [[maybe_unused]] const auto* left = data_.release(); }
  std::span<std::byte> span() const { return {data_.get(), size_}; }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::size_t size_ = 0;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace terrace
