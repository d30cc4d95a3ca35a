#include "attention/host/page_choice.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "attention/host/vector_math.hpp"
#include "base/host_threads.hpp"
#include "base/scratch.hpp"
#include "linalg/host/rotated_rows.hpp"

#define KVZAP_LEVEL_BODY "attention/host/page_choice.inc"
#include "base/each_level.hpp"

namespace kvzap::attention {
namespace {

// Space for a head's queries: the parts of each query, and one query's dims.
std::int64_t queries_size(int group, int dim) {
  return group * whole(2 * std::int64_t{dim}, 32) + dim;
}

std::int64_t full_pages(const AttentionSpan& span, int head) {
  return span.cached.retained(head) / span.cached.page_rows;
}

}  // namespace

bool PageChoice::chooses(const AttentionSpan& span) const {
  if (!span.cached.has_bounds || span.queries != 1) return false;
  for (int head = 0; head < span.cached.heads; ++head) {
    const std::int64_t full = full_pages(span, head);
    if (span.read_pages.of(full) < full) return true;
  }
  return false;
}

const std::vector<AttentionSpan>& PageChoice::operator()(const ExecutionSpace& exec,
                                                         const std::vector<AttentionSpan>& spans,
                                                         const AttentionCall& call) {
  const auto some = [](const AttentionSpan& span) { return !span.read_pages.all(); };
  if (std::none_of(spans.begin(), spans.end(), some)) return spans;
  base::fence(exec, "kvzap::attention: host loops read what the instance wrote");
  m_heads.clear();
  for (std::size_t s = 0; s < spans.size(); ++s) {
    if (chooses(spans[s])) list(static_cast<int>(s), spans[s]);
  }
  if (m_heads.empty()) return spans;
  m_spans = spans;
  const auto n = static_cast<std::int64_t>(m_heads.size());
  const Head& last = m_heads.back();
  m_scores.resize(last.first_page + last.full);
  m_order.resize(last.first_page + last.full);
  m_queries.resize(n * queries_size(call.group, call.dim));
  m_table.resize(last.first_entry + last.width);
  m_retained.resize(n);
  base::host_for("kvzap::attention::choose_pages", n,
                 2 * std::int64_t{call.dim} * call.group * last.full,
                 [&](std::int64_t i) { choose(i, call); });
  // The heads of a span come one after the other.
  for (std::int64_t i = 0; i < n; i += call.kv_heads) {
    CachedLayer& layer = m_spans[m_heads[i].span].cached;
    layer.page_table = decltype(layer.page_table)(m_table.data() + m_heads[i].first_entry,
                                                  call.kv_heads, m_heads[i].width);
    layer.retained = decltype(layer.retained)(m_retained.data() + i, call.kv_heads);
    layer.bounds = decltype(layer.bounds)(m_retained.data() + i, call.kv_heads);
  }
  return m_spans;
}

void PageChoice::list(int span, const AttentionSpan& of) {
  Head next{span, 0, 0, 0, 0, 0, 0};
  if (!m_heads.empty()) {
    const Head& last = m_heads.back();
    next.first_page = last.first_page + last.full;
    next.first_entry = last.first_entry + last.width;
  }
  for (int head = 0; head < of.cached.heads; ++head) {
    next.width = std::max(next.width, of.read_pages.of(full_pages(of, head)) + 1);
  }
  for (next.head = 0; next.head < of.cached.heads; ++next.head) {
    next.full = full_pages(of, next.head);
    next.read = of.read_pages.of(next.full);
    m_heads.push_back(next);
    next.first_page += next.full;
    next.first_entry += next.width;
  }
}

// Writes the chosen pages of the i-th head, in their order, and the page after the full ones.
void PageChoice::choose(std::int64_t i, const AttentionCall& call) {
  const Head& head = m_heads[i];
  const AttentionSpan& span = m_spans[head.span];
  const RaggedLayer& layer = span.cached;
  std::int32_t* const order = m_order.data() + head.first_page;
  std::iota(order, order + head.full, 0);
  if (head.read < head.full) {
    float* const scores = m_scores.data() + head.first_page;
    score(head, call, m_queries.data() + i * queries_size(call.group, call.dim), scores);
    std::nth_element(order, order + head.read, order + head.full,
                     [scores](std::int32_t a, std::int32_t b) {
                       return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
                     });
    std::sort(order, order + head.read);
  }
  PageId* const table = m_table.data() + head.first_entry;
  for (std::int64_t p = 0; p < head.read; ++p) table[p] = layer.page_table(head.head, order[p]);
  const std::int64_t rest = layer.retained(head.head) % layer.page_rows;
  if (rest > 0) table[head.read] = layer.page_table(head.head, head.full);
  m_retained[i] = head.read * layer.page_rows + rest;
}

// Writes the bounds of a head's full pages. Quantised rows are rotated, and so are the queries
// then. queries: queries_size floats.
void PageChoice::score(const Head& head, const AttentionCall& call, float* queries,
                       float* scores) const {
  const AttentionSpan& span = m_spans[head.span];
  const bool is_quantised = span.cached.format.quantised();
  const std::int64_t size = whole(2 * std::int64_t{call.dim}, 32);
  float* const dims = queries + call.group * size;
  const auto with_bounds = [&](auto zero) {
    using Bound = decltype(zero);
    for (int q = 0; q < call.group; ++q) {
      for (int d = 0; d < call.dim; ++d) {
        dims[d] = call.queries(span.first_query, head.head * call.group + q, d);
      }
      if (is_quantised) linalg::rotate_row(dims, call.dim);
      KVZAP_AT_LEVEL(put_parts<Bound>)(dims, call.dim, queries + q * size);
    }
    KVZAP_AT_LEVEL(bound_scores<Bound>)
    (span.cached, head.head, head.full, queries, call.group, scores);
  };
  if (is_quantised) return with_bounds(bfloat16());
  with_value_type(call.dtype(), with_bounds);
}

PageChoice::Sizes PageChoice::sizes_of(const AttentionExtents& extents) {
  if (extents.chosen_page_rows == 0) return {};
  Sizes sizes{};
  sizes.heads = extents.spans * extents.kv_heads;
  sizes.pages = extents.single_rows / extents.chosen_page_rows;
  // Heads of a span have tables of the width that the longest one needs.
  sizes.entries = sizes.heads + sizes.heads * (extents.longest_single / extents.chosen_page_rows);
  sizes.queries = sizes.heads * queries_size(extents.group, extents.head_dim);
  return sizes;
}

std::size_t PageChoice::scratch_bytes(const AttentionExtents& extents) {
  const Sizes sizes = sizes_of(extents);
  return sizes.heads * (sizeof(Head) + sizeof(std::int64_t)) +
         sizes.pages * (sizeof(float) + sizeof(std::int32_t)) + sizes.entries * sizeof(PageId) +
         sizes.queries * sizeof(float);
}

void PageChoice::reserve(const AttentionExtents& extents) {
  const Sizes sizes = sizes_of(extents);
  m_spans.reserve(sizes.heads > 0 ? extents.spans : 0);
  m_heads.reserve(sizes.heads);
  m_retained.reserve(sizes.heads);
  m_scores.reserve(sizes.pages);
  m_order.reserve(sizes.pages);
  m_table.reserve(sizes.entries);
  m_queries.reserve(sizes.queries);
}

}  // namespace kvzap::attention
