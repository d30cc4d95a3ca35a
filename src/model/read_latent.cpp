#include "model/read_latent.hpp"

namespace kvzap::model {
namespace {

/// Appends RoPE's dimensions, which begin at row `first`: the first ones of all pairs, then the
/// second ones.
void append_pairs(Ranges& rows, std::int64_t first, std::int64_t dims, bool is_interleaved) {
  if (!is_interleaved) {
    rows.emplace_back(first, first + dims);
    return;
  }
  for (const std::int64_t second : {0, 1}) {
    for (std::int64_t i = second; i < dims; i += 2) {
      rows.emplace_back(first + i, first + i + 1);
    }
  }
}

}  // namespace

Model::Weights::Latent read_latent(const WeightSource& source, const ModelConfig& config,
                                   const std::string& prefix,
                                   std::pair<std::int64_t, std::int64_t> heads) {
  const LatentConfig& latent = *config.latent;
  const std::int64_t hidden = config.hidden_size, rank = latent.rank, nope = latent.nope_dim,
                     dim = config.head_dim, value_dim = latent.value_dim;
  const Ranges all_hidden = {{0, hidden}};
  const auto part = [&](const char* name, std::int64_t extent, const Ranges& rows) {
    return TensorRows{prefix + name, extent, rows};
  };
  Model::Weights::Latent weights;
  Ranges query_rows;
  for (std::int64_t h = heads.first; h < heads.second; ++h) {
    const std::int64_t first = h * latent.query_dim();
    query_rows.emplace_back(first, first + nope);
    append_pairs(query_rows, first + nope, latent.rope_dim, config.rope_is_interleaved);
  }
  const std::int64_t query_extent = config.num_attention_heads * latent.query_dim();
  if (const std::int64_t query_rank = latent.query_rank; query_rank > 0) {
    const Ranges all = {{0, query_rank}};
    weights.query_in =
        source.linear({part("q_a_proj.weight", query_rank, all)}, hidden, all_hidden);
    if (config.qkv_bias) {
      weights.query_in_bias = source.vector({part("q_a_proj.bias", query_rank, all)});
    }
    weights.query_norm = source.vector({part("q_a_layernorm.weight", query_rank, all)});
    weights.query =
        source.linear({part("q_b_proj.weight", query_extent, query_rows)}, query_rank, all);
  } else {
    weights.query =
        source.linear({part("q_proj.weight", query_extent, query_rows)}, hidden, all_hidden);
  }
  Ranges row_rows = {{0, rank}};
  append_pairs(row_rows, rank, latent.rope_dim, config.rope_is_interleaved);
  const std::int64_t row_extent = rank + latent.rope_dim;
  weights.row_in =
      source.linear({part("kv_a_proj_with_mqa.weight", row_extent, row_rows)}, hidden, all_hidden);
  if (config.qkv_bias) {
    weights.row_in_bias = source.vector({part("kv_a_proj_with_mqa.bias", row_extent, row_rows)});
  }
  if (latent.gates_heads) {
    weights.head_gates = source.linear({part("g_proj.weight", config.num_attention_heads, {heads})},
                                       hidden, all_hidden);
  }
  weights.row_norm = source.vector({part("kv_a_layernorm.weight", rank, {{0, rank}})}, 0,
                                   static_cast<float>(latent.row_multiplier));
  // The place of a latent's dimension in a row: behind RoPE's pairs, in two parts half a head
  // apart.
  const std::int64_t turning = latent.rope_dim / 2, first = dim / 2 - turning;
  const auto place = [&](std::int64_t i) { return i < first ? turning + i : 2 * turning + i; };
  const std::int64_t block = nope + value_dim;
  for (std::int64_t h = heads.first; h < heads.second; ++h) {
    const auto rows = [&](std::int64_t begin, std::int64_t end) {
      return part("kv_b_proj.weight", config.num_attention_heads * block,
                  {{h * block + begin, h * block + end}});
    };
    weights.to_key.push_back(
        source.arranged(rows(0, nope), rank, dim, nope, [&](const float* from, float* to) {
          for (std::int64_t n = 0; n < nope; ++n) {
            for (std::int64_t i = 0; i < rank; ++i) to[place(i) * nope + n] = from[n * rank + i];
          }
        }));
    weights.from_value.push_back(
        source.arranged(rows(nope, block), rank, value_dim, dim, [&](const float* from, float* to) {
          for (std::int64_t v = 0; v < value_dim; ++v) {
            for (std::int64_t i = 0; i < rank; ++i) to[v * dim + place(i)] = from[v * rank + i];
          }
        }));
  }
  return weights;
}

}  // namespace kvzap::model
