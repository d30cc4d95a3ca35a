#include "linalg/host/delta_rule.hpp"

#include <algorithm>

#include "base/simd.hpp"

namespace kvzap::linalg {
namespace {

constexpr int width = delta_columns;

/// sums += state^T factors, for `width` columns of a state (key_dim, width). Sums over even and odd
/// rows hide the latency of additions.
KVZAP_BODY void multiply_columns(const float* state, const float* factors, int key_dim,
                                 float* sums) {
  float even[width] = {}, odd[width] = {};
  int i = 0;
  for (; i + 1 < key_dim; i += 2) {
    const float* const row = state + std::int64_t{i} * width;
    const float f0 = factors[i], f1 = factors[i + 1];
    for (int c = 0; c < width; ++c) even[c] += row[c] * f0;
    for (int c = 0; c < width; ++c) odd[c] += row[width + c] * f1;
  }
  if (i < key_dim) {
    const float* const row = state + std::int64_t{i} * width;
    for (int c = 0; c < width; ++c) even[c] += row[c] * factors[i];
  }
  for (int c = 0; c < width; ++c) sums[c] = even[c] + odd[c];
}

/// Updates `width` columns of a state (key_dim, width): row i becomes decays[i * Step] times it,
/// plus key[i] change. sums = state^T query.
template <int Step>
KVZAP_BODY void add_change(float* state, const float* decays, const float* key, const float* query,
                           const float* change, int key_dim, float* sums) {
  float own[width] = {};
  for (int i = 0; i < key_dim; ++i) {
    float* const row = state + std::int64_t{i} * width;
    const float k = key[i], q = query[i], decay = decays[i * Step];
    for (int c = 0; c < width; ++c) {
      const float updated = decay * row[c] + k * change[c];
      row[c] = updated;
      own[c] += q * updated;
    }
  }
  std::copy_n(own, width, sums);
}

// Columns do not depend on each other. Those of one call stay in the L1 cache for all tokens.
KVZAP_BODY void delta_rule_body(const float* before, float* after, const DeltaRows& rows, int first,
                                int count, float* room) {
  const int key_dim = rows.key_dim, value_dim = rows.value_dim;
  const bool is_of_rows = rows.decay_step == 1;
  float* const decayed_key = room + std::int64_t{key_dim} * width;
  for (int i = 0; i < key_dim; ++i) {
    const float* const from = before + std::int64_t{i} * value_dim + first;
    float* const to = room + std::int64_t{i} * width;
    std::copy_n(from, count, to);
    std::fill_n(to + count, width - count, 0.0f);
  }
  for (std::int64_t t = 0; t < rows.tokens; ++t) {
    const float* const query = rows.queries + t * rows.stride;
    const float* const key = rows.keys + t * rows.stride;
    const float* const decays = rows.decays + t * rows.rate_stride;
    float change[width] = {};
    std::copy_n(rows.values + t * rows.stride + first, count, change);
    if (rows.strengths != nullptr) {
      const float strength = rows.strengths[t * rows.rate_stride];
      for (int i = 0; is_of_rows && i < key_dim; ++i) decayed_key[i] = decays[i] * key[i];
      const float decay = is_of_rows ? 1.0f : decays[0];
      float known[width];
      multiply_columns(room, is_of_rows ? decayed_key : key, key_dim, known);
      for (int c = 0; c < count; ++c) change[c] = strength * (change[c] - decay * known[c]);
    }
    float sums[width];
    if (is_of_rows) {
      add_change<1>(room, decays, key, query, change, key_dim, sums);
    } else {
      add_change<0>(room, decays, key, query, change, key_dim, sums);
    }
    std::copy_n(sums, count, rows.outputs + t * rows.output_stride + first);
  }
  for (int i = 0; i < key_dim; ++i) {
    std::copy_n(room + std::int64_t{i} * width, count, after + std::int64_t{i} * value_dim + first);
  }
}

}  // namespace

KVZAP_KERNEL(void, delta_rule,
             (const float* before, float* after, const DeltaRows& rows, int first, int count,
              float* room),
             (before, after, rows, first, count, room))

}  // namespace kvzap::linalg
