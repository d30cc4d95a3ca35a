// Launches that are recorded once and made again together: on CUDA, as one graph.
#pragma once

#include <functional>
#include <memory>

#include "base/kokkos_compat.hpp"

namespace kvzap::base {

/// The launches of a piece of work, in order. Kernels get the arguments that they had when they
/// were recorded, so what differs from time to time lies in memory of the device. The memory that
/// they name must stay where it is (see base::memory_moves).
///
/// On CUDA it is a graph of the instance's stream, launched at once. On hosts, which have it for
/// tests, it is a list of what went through base::launch. Other backends have none.
class LaunchGraph {
 public:
  /// Makes an empty graph. Throws the error of is_available.
  LaunchGraph();
  ~LaunchGraph();
  LaunchGraph(const LaunchGraph&) = delete;
  LaunchGraph& operator=(const LaunchGraph&) = delete;

  /// Returns whether the backend has graphs and the environment has no KVZAP_GRAPH=off. Throws
  /// Error if that variable is neither on nor off.
  static bool is_available();

  /// Calls work(), whose launches on `exec` are kept instead of carried out. work must not wait.
  /// Returns false, and keeps nothing, if the backend refuses. After an error of work, which it
  /// rethrows, the graph is empty.
  bool record(const ExecutionSpace& exec, const std::function<void()>& work);
  /// Makes the launches. There must be some.
  void launch(const ExecutionSpace& exec) const;
  /// Returns whether something is recorded.
  bool is_recorded() const { return m_recorded != nullptr; }
  /// Forgets what is recorded.
  void clear();

 private:
  struct Recorded;
  std::unique_ptr<Recorded> m_recorded;
};

}  // namespace kvzap::base
