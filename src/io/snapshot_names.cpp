// Names that builds without HDF5 also need.
#include <fmt/format.h>

#include <kvzap/engine/snapshot.hpp>

namespace kvzap {

std::string_view name_of(SnapshotContent content) {
  switch (content) {
    case SnapshotContent::positions:
      return "positions";
    case SnapshotContent::scores:
      return "scores";
    case SnapshotContent::all:
      return "all";
  }
  return "unknown";
}

SnapshotContent snapshot_content_from_name(const std::string& name) {
  for (const SnapshotContent content :
       {SnapshotContent::positions, SnapshotContent::scores, SnapshotContent::all}) {
    if (name == name_of(content)) return content;
  }
  throw Error(
      fmt::format("content of a snapshot is '{}'; expected positions, scores or all", name));
}

}  // namespace kvzap
