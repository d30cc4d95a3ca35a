#include "policy/segments.hpp"

#include <algorithm>
#include <numeric>

#include "base/kokkos_compat.hpp"
#include "base/team.hpp"

namespace kvzap::policy {
namespace {

// Threads that share a segment on a device.
constexpr int device_team_size = 256;

using Segments = Kokkos::View<const Segment*, MemorySpace>;

// One team per segment, because the oldest ties stay.
struct JudgeRows {
  Segments segments;

  template <class Team>
  KOKKOS_FUNCTION void operator()(const Team& team) const {
    const Segment segment = segments(team.league_rank());
    Kokkos::parallel_scan(Kokkos::TeamThreadRange(team, static_cast<int>(segment.rows)),
                          [&](int row, std::int64_t& ties, bool final) {
                            const float score = segment.scores[row * segment.stride];
                            const bool tie = score == segment.cutoff.score;
                            if (final) {
                              const bool stays = !EvictionRule::is_finite(score) ||
                                                 score > segment.cutoff.score ||
                                                 (tie && ties < segment.cutoff.ties);
                              if (segment.keep) {
                                segment.keep[row] = stays ? 1 : 0;
                              } else {
                                segment.marked[row] = stays ? segment.mark : score;
                              }
                            }
                            if (tie) ++ties;
                          });
  }
};

}  // namespace

void select(const ExecutionSpace& exec, const Communicator& comm,
            const std::vector<std::int64_t>& pools, const std::vector<std::int64_t>& orders,
            const std::vector<std::int64_t>& keep_of_pool, std::vector<Segment>& segments) {
  std::vector<ScoreSegment> scored;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    using View = decltype(ScoreSegment::scores);
    const Kokkos::LayoutStride layout(static_cast<std::size_t>(segment.rows),
                                      static_cast<std::size_t>(segment.stride));
    scored.push_back({View(segment.scores, layout), pools[i], orders[i]});
  }
  const std::vector<Cutoff> cutoffs = select_top(exec, comm, scored, keep_of_pool);
  for (std::size_t i = 0; i < segments.size(); ++i) segments[i].cutoff = cutoffs[i];
}

void select_alone(const ExecutionSpace& exec, const std::vector<std::int64_t>& keep,
                  std::vector<Segment>& segments) {
  std::vector<std::int64_t> pools(segments.size());
  std::iota(pools.begin(), pools.end(), 0);
  const std::vector<std::int64_t> orders(segments.size(), 0);
  select(exec, Communicator::self(), pools, orders, keep, segments);
}

void judge(const ExecutionSpace& exec, const std::vector<Segment>& segments) {
  if (segments.empty()) return;
  const Kokkos::View<Segment*, MemorySpace> device(
      Kokkos::view_alloc(Kokkos::WithoutInitializing, "kvzap::segments"), segments.size());
  const auto host = Kokkos::create_mirror_view(device);
  std::copy(segments.begin(), segments.end(), host.data());
  Kokkos::deep_copy(exec, device, host);
  const JudgeRows kernel{device};
  const auto no_bytes = [](int) { return std::size_t{0}; };
  Kokkos::parallel_for("kvzap::segments::judge",
                       base::team_policy(exec, static_cast<std::int64_t>(segments.size()),
                                         {device_team_size, 1}, kernel, no_bytes),
                       kernel);
  base::fence(exec, "kvzap::segments: verdicts are there, and the list of segments goes");
}

}  // namespace kvzap::policy
