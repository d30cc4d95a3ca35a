#include "engine/page_placement.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/scratch.hpp"

namespace kvzap::engine {
namespace {

// A message holds some pages, so that the buffers of both ranks stay small.
constexpr std::size_t message_bytes = std::size_t{1} << 20;

/// A cache for pages of all heads. Its sequences have no tokens, so its rings stay empty.
CacheShape shape_of_remote(const CacheShape& own, const HeadPartition& partition) {
  CacheShape shape;
  for (int l = 0; l < static_cast<int>(own.heads.size()); ++l) {
    shape.heads.push_back(own.has_pages(l) ? partition.n_kv_heads() : 0);
  }
  shape.head_dim = own.head_dim;
  shape.window = 1;
  shape.page_rows = own.page_rows;
  shape.format = own.format;
  return shape;
}

}  // namespace

PagePlacement::PagePlacement(const HeadPartition& partition, const Communicator& comm, Cache& own,
                             MemoryMeter* meter)
    : m_partition(partition),
      m_comm(comm),
      m_own(own),
      m_remote(own.dtype(), shape_of_remote(own.shape(), partition), meter),
      m_owners(partition.n_layers() * partition.n_kv_heads()),
      m_local_heads(m_owners.size()) {
  for (int l = 0; l < partition.n_layers(); ++l) {
    for (int r = 0; r < partition.n_ranks(); ++r) {
      int local = 0;
      for (const int head : partition.heads(l, r)) {
        m_owners[l * partition.n_kv_heads() + head] = r;
        m_local_heads[l * partition.n_kv_heads() + head] = local++;
      }
    }
  }
}

auto PagePlacement::runs(SequenceId sequence, int layer, int head) const
    -> const std::vector<Run>& {
  static const std::vector<Run> none;
  const auto found = m_away.find(sequence);
  return found == m_away.end() ? none
                               : found->second.heads[layer * m_partition.n_kv_heads() + head];
}

auto PagePlacement::runs_of(SequenceId sequence, int layer, int head) -> std::vector<Run>& {
  Away& away = m_away[sequence];
  away.heads.resize(m_owners.size());
  return away.heads[layer * m_partition.n_kv_heads() + head];
}

std::int64_t PagePlacement::rows_away(SequenceId sequence, int layer, int head) const {
  std::int64_t pages = 0;
  for (const Run& run : runs(sequence, layer, head)) pages += run.pages;
  return pages * m_own.shape().page_rows;
}

auto PagePlacement::remote_rows(SequenceId sequence, int layer) -> RemoteRows {
  const auto found = m_away.find(sequence);
  if (found == m_away.end() || found->second.remote < 0) return {};
  return {true, m_remote.layer(found->second.remote, layer)};
}

auto PagePlacement::no_rows(int layer) -> Layer {
  if (m_nobody < 0) m_nobody = m_remote.add_sequence();
  return heads_of(m_remote.layer(m_nobody, layer), 0, 1);
}

void PagePlacement::fork(SequenceId source, SequenceId copy) {
  const auto found = m_away.find(source);
  if (found == m_away.end()) return;
  found->second.is_forked = true;
  Away away = found->second;
  if (away.remote >= 0) away.remote = m_remote.fork(away.remote);
  m_away[copy] = std::move(away);
}

void PagePlacement::free(SequenceId sequence) {
  const auto found = m_away.find(sequence);
  if (found == m_away.end()) return;
  if (found->second.remote >= 0) m_remote.free_sequence(found->second.remote);
  m_away.erase(found);
  share_limit();
}

std::size_t PagePlacement::trim() {
  const std::size_t bytes = m_remote.trim();
  share_limit();
  return bytes;
}

void PagePlacement::set_limit(std::size_t bytes) {
  m_limit = bytes;
  share_limit();
}

// What one of the two caches has, the other may not take.
void PagePlacement::share_limit() {
  if (m_limit == 0) return m_own.set_limit(0);
  const auto rest = [&](const CacheBytes& other) {
    return m_limit - std::min(m_limit - 1, other.allocated);
  };
  m_remote.set_limit(rest(m_own.bytes()));
  m_own.set_limit(rest(m_remote.bytes()));
}

// Returns what the owners have, for each sequence, layer and head.
auto PagePlacement::gather_rows(const std::vector<SequenceId>& sequences) const
    -> std::vector<HeadRows> {
  const int layers = m_partition.n_layers(), heads = m_partition.n_kv_heads();
  const Access access(m_own);
  const auto for_each_head = [&](int rank, const auto& visit) {
    for (std::size_t s = 0; s < sequences.size(); ++s) {
      for (int l = 0; l < layers; ++l) {
        if (!m_own.shape().has_pages(l)) continue;
        for (const int head : m_partition.heads(l, rank)) visit(s, l, head);
      }
    }
  };
  std::vector<std::int64_t> mine;
  for_each_head(m_comm.rank(), [&](std::size_t s, int l, int head) {
    const int h = local_head(l, head);
    mine.push_back(m_own.rows(sequences[s], l, h));
    mine.push_back(access.full_pages(sequences[s], l, h));
    mine.push_back(access.own_full_pages(sequences[s], l, h));
  });
  const auto all = m_comm.all_gather(mine);
  std::vector<HeadRows> rows(sequences.size() * layers * heads);
  for (int r = 0; r < m_comm.size(); ++r) {
    auto next = all[r].begin();
    for_each_head(r, [&](std::size_t s, int l, int head) {
      HeadRows& of = rows[(s * layers + l) * heads + head];
      of.rows = *next++;
      of.full = *next++;
      of.available = *next++;
    });
  }
  return rows;
}

double PagePlacement::balance(const std::vector<SequenceId>& sequences, double tolerance,
                              std::int64_t most_bytes) {
  if (m_comm.size() == 1 || sequences.empty()) return 1;
  if (m_own.shape().bounds_from) return 1;  // the choice of pages needs all pages of a head
  const std::vector<HeadRows> rows = gather_rows(sequences);
  std::int64_t most_pages =
      std::max<std::int64_t>(1, most_bytes / static_cast<std::int64_t>(m_own.pool().page_bytes()));
  double worst = 1;
  for (int l = 0; l < m_partition.n_layers(); ++l) {
    if (!m_own.shape().has_pages(l)) continue;
    worst = std::max(worst, balance_layer(l, sequences, rows, tolerance, most_pages));
  }
  share_limit();
  return worst;
}

// The heads of the plan are in order of sequence, then head.
LayerPlan PagePlacement::plan_layer(int layer, const std::vector<SequenceId>& sequences,
                                    const std::vector<HeadRows>& rows) const {
  const int heads = m_partition.n_kv_heads();
  std::vector<HeadPages> all;
  all.reserve(sequences.size() * heads);
  for (std::size_t s = 0; s < sequences.size(); ++s) {
    const auto found = m_away.find(sequences[s]);
    const bool is_forked = found != m_away.end() && found->second.is_forked;
    for (int h = 0; h < heads; ++h) {
      const HeadRows& own = rows[(s * m_partition.n_layers() + layer) * heads + h];
      all.push_back({owner(layer, h), own.rows, own.full, own.available, !is_forked,
                     runs(sequences[s], layer, h)});
    }
  }
  return LayerPlan(m_comm.size(), m_own.shape().page_rows, std::move(all));
}

// Moves pages of a layer, and keeps `most_pages` up to date.
double PagePlacement::balance_layer(int layer, const std::vector<SequenceId>& sequences,
                                    const std::vector<HeadRows>& rows, double tolerance,
                                    std::int64_t& most_pages) {
  LayerPlan plan = plan_layer(layer, sequences, rows);
  const double skew = plan.skew();
  while (const auto next = plan.next(tolerance, most_pages)) {
    const auto heads = static_cast<std::size_t>(m_partition.n_kv_heads());
    if (!carry_out({sequences[next->head / heads], layer, static_cast<int>(next->head % heads),
                    next->from, next->to, next->first, next->pages})) {
      most_pages = 0;
      break;
    }
    plan.apply(*next);
    most_pages -= next->pages;
  }
  return skew;
}

void PagePlacement::recall(SequenceId sequence) {
  for (int l = 0; l < m_partition.n_layers(); ++l) {
    for (int h = 0; h < m_partition.n_kv_heads(); ++h) {
      while (!runs(sequence, l, h).empty()) {
        const Run run = runs(sequence, l, h).back();
        if (!carry_out({sequence, l, h, run.rank, owner(l, h), run.first, run.pages})) {
          throw AgreedOutOfMemory(
              fmt::format("out of memory: rank {} has no room for pages that rank {} holds for it",
                          owner(l, h), run.rank));
        }
      }
    }
  }
  share_limit();
}

bool PagePlacement::carry_out(const Move& move) {
  const bool to_owner = move.to == owner(move.layer, move.head);
  bool reserved = true;
  try {
    reserve(move);
  } catch (const std::exception&) {  // of memory: no other error is possible here
    reserved = false;
  }
  if (m_comm.all_reduce_max(reserved ? 0 : 1) > 0) {
    if (reserved && m_comm.rank() == move.to) {
      Access(to_owner ? m_own : m_remote)
          .remove_pages(ExecutionSpace(), run_at(move, m_comm.rank()), true);
    }
    const auto found = m_away.find(move.sequence);
    if (found != m_away.end() && found->second.pages == 0) free(move.sequence);
    return false;
  }
  send_pages(move);
  note(move);
  return true;
}

/// The pages of a move in the list of the rank that sends or receives them.
auto PagePlacement::run_at(const Move& move, int rank) -> PageRun {
  if (rank == owner(move.layer, move.head)) {
    return {move.sequence, move.layer, local_head(move.layer, move.head), move.first, move.pages};
  }
  const SequenceId remote = m_away.at(move.sequence).remote;
  const std::int64_t full = Access(m_remote).full_pages(remote, move.layer, move.head);
  return {remote, move.layer, move.head, full - move.pages, move.pages};
}

// Takes memory for the record of a move, for its messages and, on the receiver, for its pages.
void PagePlacement::reserve(const Move& move) {
  std::vector<Run>& runs = runs_of(move.sequence, move.layer, move.head);
  base::reserve_room(runs, runs.size() + 1);
  const int rank = m_comm.rank();
  if (rank != move.from && rank != move.to) return;
  const std::size_t bytes = m_own.pool().page_bytes();
  const auto pages = std::min<std::size_t>(static_cast<std::size_t>(move.pages),
                                           std::max(bytes, message_bytes) / bytes);
  base::reserve_room(m_buffer, pages * bytes);
  m_buffer.resize(pages * bytes);
  if (rank == move.from) return;
  share_limit();
  const ExecutionSpace exec;
  if (rank == owner(move.layer, move.head)) {
    return Access(m_own).insert_pages(exec, run_at(move, rank));
  }
  SequenceId& remote = m_away.at(move.sequence).remote;
  if (remote < 0) remote = m_remote.add_sequence();
  Access access(m_remote);
  access.insert_pages(exec, {remote, move.layer, move.head,
                             access.full_pages(remote, move.layer, move.head), move.pages});
}

void PagePlacement::send_pages(const Move& move) {
  const int rank = m_comm.rank();
  if (rank != move.from && rank != move.to) return;
  const ExecutionSpace exec;
  Access access(rank == owner(move.layer, move.head) ? m_own : m_remote);
  const PageRun run = run_at(move, rank);
  const std::size_t bytes = access.page_bytes();
  const auto at_once = static_cast<std::int64_t>(m_buffer.size() / bytes);
  for (std::int64_t begin = 0; begin < move.pages; begin += at_once) {
    const std::int64_t end = std::min(move.pages, begin + at_once);
    for (std::int64_t page = begin; rank == move.from && page < end; ++page) {
      access.read_page(exec, run, page, m_buffer.data() + (page - begin) * bytes);
    }
    m_comm.transfer(m_buffer.data(), static_cast<std::size_t>(end - begin) * bytes, move.from,
                    move.to);
    for (std::int64_t page = begin; rank == move.to && page < end; ++page) {
      access.write_page(exec, run, page, m_buffer.data() + (page - begin) * bytes);
    }
  }
  if (rank == move.from) access.remove_pages(exec, run);
}

// Records a move that has happened.
void PagePlacement::note(const Move& move) {
  auto& runs = runs_of(move.sequence, move.layer, move.head);
  Away& away = m_away.at(move.sequence);
  const int home = owner(move.layer, move.head);
  m_pages_moved += move.pages;
  note_move(runs, home, {0, move.from, move.to, move.first, move.pages});
  if (move.from == home) away.pages += move.pages;
  if (move.to != home) return;
  away.pages -= move.pages;
  if (away.pages == 0) free(move.sequence);
}

}  // namespace kvzap::engine
