// Runs of scores that compete with one another, and the verdict on each row. Wraps select_top.
#pragma once

#include <kvzap/core/communicator.hpp>
#include <kvzap/core/selection.hpp>
#include <vector>

namespace kvzap::policy {

/// Consecutive rows of a head. Either `keep` or `marked` receives the verdict.
struct Segment {
  const float* scores = nullptr;  // (row)
  std::int64_t stride = 1;        // floats from one row to the next
  std::int64_t rows = 0;
  Cutoff cutoff = {};
  std::uint8_t* keep = nullptr;  // (row): 1 if it stays, else 0
  float* marked = nullptr;       // (row): `mark` if it stays, else its score
  float mark = 0;
};

/// Sets the segments' cutoffs by select_top. See there for pools and orders (segment) and
/// keep_of_pool (pool). Collective.
void select(const ExecutionSpace& exec, const Communicator& comm,
            const std::vector<std::int64_t>& pools, const std::vector<std::int64_t>& orders,
            const std::vector<std::int64_t>& keep_of_pool, std::vector<Segment>& segments);

/// Does the same if every segment is its own pool and keep (segment) of its rows stay. Does not
/// communicate.
void select_alone(const ExecutionSpace& exec, const std::vector<std::int64_t>& keep,
                  std::vector<Segment>& segments);

/// Writes the verdicts that follow from the cutoffs. Waits for `exec`.
void judge(const ExecutionSpace& exec, const std::vector<Segment>& segments);

}  // namespace kvzap::policy
