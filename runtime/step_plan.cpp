#include "runtime/step_plan.h"

#include "terrace/error.h"

namespace terrace {

Lane lane_of(OpKind kind) {
  switch (kind) {
    case OpKind::read: return Lane::nvme_read;
    case OpKind::write: return Lane::nvme_write;
    case OpKind::upload: return Lane::host_to_device;
    case OpKind::download: return Lane::device_to_host;
    case OpKind::update:
    case OpKind::accumulate:
    case OpKind::measure: return Lane::adam;
    case OpKind::forward:
    case OpKind::backward: return Lane::compute;
    case OpKind::commit: return Lane::commit;
  }
  TERRACE_CHECK(false);
}

bool on_device(OpKind kind) {
  const Lane lane = lane_of(kind);
  return lane == Lane::host_to_device || lane == Lane::device_to_host || lane == Lane::compute;
}

const char* to_string(OpKind kind) {
  switch (kind) {
    case OpKind::read: return "read";
    case OpKind::write: return "write";
    case OpKind::upload: return "upload";
    case OpKind::download: return "download";
    case OpKind::update: return "update";
    case OpKind::accumulate: return "accumulate";
    case OpKind::measure: return "measure";
    case OpKind::forward: return "forward";
    case OpKind::backward: return "backward";
    case OpKind::commit: return "commit";
  }
  TERRACE_CHECK(false);
}

}  // namespace terrace
