// Port: the ranks. Collectives of bytes over a group of ranks; sums are done by the caller, in rank
// order, so that the result never depends on the communicator.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace terrace {

// Thread rule: one thread; every rank of the group makes the same calls in the same order.
// Zero lengths are legal everywhere. Failures throw Error(communication).
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // received holds size() pieces of sent.size() bytes, in rank order.
  virtual void all_gather(std::span<const std::byte> sent, std::span<std::byte> received) = 0;
  // sent holds size() pieces, the r-th for rank r; received gets one piece from each, in rank
  // order.
  virtual void all_to_all(std::span<const std::byte> sent, std::span<std::byte> received) = 0;
  virtual void broadcast(std::span<std::byte> data, int root) = 0;
  virtual void barrier() = 0;
};

// The group of one.
std::unique_ptr<Communicator> make_single_rank();

}  // namespace terrace
