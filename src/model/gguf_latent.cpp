#include "model/gguf_latent.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "model/gguf_rows.hpp"

namespace kvzap::model {

using nlohmann::json;

namespace {

constexpr const char* rank_key = "attention.kv_lora_rank";
constexpr const char* query_rank_key = "attention.q_lora_rank";
constexpr const char* rope_key = "rope.dimension_count";
constexpr const char* score_multiplier_key = "rope.scaling.yarn_log_multiplier";
/// Files of deepseek2 hold a tenth of the multiplier.
constexpr double score_multiplier_unit = 0.1;

/// Returns whether the file holds the sizes of heads of the absorbed maps, beside those of the maps
/// themselves ("_mla"). Older files, and those of minicpm3, hold the latter alone.
bool has_absorbed_sizes(const GgufFields& f) {
  if (!f.reads()) return f.architecture.has_tensor("attn_k_b");
  return f.metadata().has(f.own("attention.key_length_mla"));
}

void read_sizes(GgufFields& f) {
  constexpr std::int64_t most_dims = 65536;
  const bool is_absorbed = has_absorbed_sizes(f);
  const auto size = [&](const char* key, std::int64_t least) {
    return f.whole(key, least, most_dims);
  };
  const std::int64_t rank = size(rank_key, 1), rope = size(rope_key, 2);
  const auto key = [&](const char* plain) {
    return is_absorbed ? fmt::format("{}_mla", plain) : std::string(plain);
  };
  const std::string query_key = key("attention.key_length");
  const std::int64_t query = size(query_key.c_str(), 1);
  const std::int64_t value = size(key("attention.value_length").c_str(), 1);
  if (rope % 2 != 0) f.fail_key(rope_key, "an even number", fmt::format("{}", rope));
  if (rank % 2 != 0) f.fail_key(rank_key, "an even number", fmt::format("{}", rank));
  if (query <= rope) {
    f.fail_key(query_key, fmt::format("more than {} ({})", rope_key, rope),
               fmt::format("{}", query));
  }
  const auto require = [&](const char* absorbed_key, std::int64_t expected) {
    const std::int64_t found = f.find_integer(absorbed_key, 1).value_or(expected);
    if (is_absorbed && found != expected) {
      f.fail_key(absorbed_key, fmt::format("{} by {}", expected, rank_key),
                 fmt::format("{}", found));
    }
  };
  require("attention.key_length", rank + rope);
  require("attention.value_length", rank);
  f.config["kv_lora_rank"] = rank;
  f.config["qk_rope_head_dim"] = rope;
  f.config["qk_nope_head_dim"] = query - rope;
  f.config["v_head_dim"] = value;
  f.head_dim = rank + rope;
  f.rotary_dim = rope;
}

void write_sizes(GgufFields& f) {
  const LatentConfig& latent = *f.model.latent;
  f.head_dim = f.model.head_dim;
  f.rotary_dim = latent.rope_dim;
  f.add(rank_key, latent.rank);
  if (has_absorbed_sizes(f)) {
    f.add("attention.key_length", latent.rank + latent.rope_dim);
    f.add("attention.value_length", latent.rank);
    f.add("attention.key_length_mla", latent.query_dim());
    f.add("attention.value_length_mla", latent.value_dim);
  } else {
    f.add("attention.key_length", latent.query_dim());
    f.add("attention.value_length", latent.value_dim);
  }
}

/// The parts of RoPE's pairs are neighbours in files, as in published checkpoints.
void neighbours_turn(GgufFields& f) {
  f.implied("rope_interleave", true, f.model.rope_is_interleaved);
}

/// Returns mscale_all_dim of the model that is written, by which latent attention multiplies its
/// scores by (0.1 mscale_all_dim ln factor + 1)^2; 0: it does not.
double scale_of_all(const ModelConfig& model) {
  const double growth = 0.1 * std::log(model.rope_scaling->factor);
  const double plain = std::sqrt(static_cast<double>(model.latent->query_dim()));
  return growth > 0 ? (std::sqrt(*model.attention_multiplier * plain) - 1) / growth : 0;
}

/// The gating function of the file. Older files of GLM-4.7-Flash lack the key.
std::int64_t gating_of(GgufFields& f) {
  constexpr std::int64_t flash_layers = 47, flash_tokens = 154880;
  const bool is_flash = (f.layers == flash_layers || f.layers == flash_layers + 1) &&
                        f.size("vocab_size") == flash_tokens;
  return f.find_integer("expert_gating_func", 0).value_or(is_flash ? sigmoid : softmax);
}

void query_rank(GgufFields& f) {
  const std::int64_t rank = f.find_integer(query_rank_key, 0).value_or(0);
  f.config["q_lora_rank"] = rank > 0 ? json(rank) : json(nullptr);
  f.add(query_rank_key, f.model.latent->query_rank);
}

void latent_rows(GgufFields& f) {
  query_rank(f);
  no_attention_bias(f);
  f.config["attention_bias"] = false;
}

/// Runs `visit` with a head, the rows of it before `first`, and the number of rows, for all heads
/// that rows `first` to `end` - 1 belong to. `rows`: those of a head.
template <class Visit>
void visit_heads(std::int64_t first, std::int64_t end, std::int64_t rows, const Visit& visit) {
  while (first < end) {
    const std::int64_t begin = first % rows, count = std::min(rows - begin, end - first);
    visit(first / rows, begin, count);
    first += count;
  }
}

/// Reads columns `column` to `column` + `count` - 1 of rows `first` to `end` - 1 as rows. Each of
/// them takes `stride` values of `target`.
void read_transposed(const StoredTensor& tensor, std::int64_t first, std::int64_t end,
                     std::int64_t column, std::int64_t count, float* target, std::int64_t stride) {
  const std::int64_t rows = end - first;
  std::vector<float> values(static_cast<std::size_t>(rows * count));
  tensor.read(first, end, column, column + count, values.data());
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t c = 0; c < count; ++c) {
      target[c * stride + row] = values[static_cast<std::size_t>(row * count + c)];
    }
  }
}

class JoinedLatentMaps final : public StoredTensor {
 public:
  JoinedLatentMaps(std::unique_ptr<StoredTensor> keys, std::unique_ptr<StoredTensor> values,
                   const LatentConfig& latent)
      : m_keys(std::move(keys)), m_values(std::move(values)), m_latent(latent) {}

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    const std::int64_t width = end - begin, nope = m_latent.nope_dim;
    const std::int64_t values = m_latent.value_dim, rank = m_latent.rank;
    visit_heads(row_begin, row_end, nope + values,
                [&](std::int64_t head, std::int64_t first, std::int64_t count) {
                  const std::int64_t keys = std::clamp(nope - first, std::int64_t(0), count);
                  if (keys > 0) {
                    read_transposed(*m_keys, head * rank + begin, head * rank + end, first, keys,
                                    target, width);
                  }
                  if (count > keys) {
                    const std::int64_t row = head * values + first + keys - nope;
                    m_values->read(row, row + count - keys, begin, end, target + keys * width);
                  }
                  target += count * width;
                });
  }
  std::string description() const override { return m_keys->description(); }
  void release() const override {
    m_keys->release();
    m_values->release();
  }

 private:
  std::unique_ptr<StoredTensor> m_keys, m_values;
  LatentConfig m_latent;
};

}  // namespace

void latent_head(GgufFields& f) {
  if (f.reads()) {
    read_sizes(f);
    f.config["num_key_value_heads"] = f.config["num_attention_heads"];
  } else {
    write_sizes(f);
  }
}

void latent_yarn(GgufFields& f) {
  constexpr double tolerance = 1e-6;
  const double found = f.find_factor(score_multiplier_key, 0) / score_multiplier_unit;
  if (found != 0) f.config["mscale"] = f.config["mscale_all_dim"] = found;
  if (f.reads()) return;
  const double all = scale_of_all(f.model);
  if (std::abs(all) < tolerance ||
      std::abs(f.model.rope_scaling->attention_factor - 1) > tolerance) {
    refuse_scaling(f);
  }
  f.add(score_multiplier_key, score_multiplier_unit * all);
}

void deepseek_v2_rows(GgufFields& f) {
  latent_rows(f);
  grouped_experts(f, softmax);
  expert_groups(f);
  // Programs divide weights by their sum if the file says so; the class never does.
  f.require_key("expert_weights_norm", false);
  f.config.erase("norm_topk_prob");
  f.config["topk_method"] = f.config["n_group"] == 1 ? "greedy" : "group_limited_greedy";
}

void deepseek_v3_rows(GgufFields& f) {
  latent_rows(f);
  neighbours_turn(f);
  grouped_experts(f, sigmoid);
  expert_groups(f);
}

void youtu_rows(GgufFields& f) {
  latent_rows(f);
  neighbours_turn(f);
  for (const char* key : {width_key, "leading_dense_block_count"}) f.find_integer(key, 0);
  f.add("leading_dense_block_count", f.model.num_hidden_layers);
  f.add(width_key, f.model.intermediate_size);
  f.add("expert_shared_count", 0);
}

void mistral4_rows(GgufFields& f) {
  latent_rows(f);
  neighbours_turn(f);
  scaled_queries(f);
  grouped_experts(f, softmax);
  expert_groups(f);
}

void minicpm3_rows(GgufFields& f) {
  constexpr double embedding = 12, depth = 1.4, base = 256, tolerance = 1e-6;
  latent_rows(f);
  f.require(f.model.latent->query_rank > 0, "q_lora_rank", "a number", "null");
  f.implied("scale_emb", embedding, f.model.embedding_multiplier);
  const double layers = std::sqrt(static_cast<double>(f.layers));
  const auto fixed = [&](const char* field, double value, double found, double expected) {
    f.config[field] = value;
    f.require(std::abs(found / expected - 1) < tolerance, field, fmt::format("{}", value),
              "another number");
  };
  fixed("scale_depth", depth, f.model.residual_multiplier, depth / layers);
  f.config["dim_model_base"] = static_cast<std::int64_t>(base);
  const double divisor = static_cast<double>(f.size("hidden_size")) / base;
  f.require(std::abs(f.model.logits_divisor / divisor - 1) < tolerance, "dim_model_base", "256",
            "another number");
}

bool is_youtu(GgufFields& f) { return f.find_integer("expert_count", 0).value_or(0) == 0; }

bool is_deepseek_v2(GgufFields& f) { return gating_of(f) == softmax; }

bool is_mistral4(GgufFields& f) {
  return is_deepseek_v2(f) && f.metadata().find_flag(f.read("expert_weights_norm")).value_or(false);
}

std::unique_ptr<StoredTensor> joined_latent_maps(std::unique_ptr<StoredTensor> keys,
                                                 std::unique_ptr<StoredTensor> values,
                                                 const LatentConfig& latent) {
  return std::make_unique<JoinedLatentMaps>(std::move(keys), std::move(values), latent);
}

void read_latent_keys(const StoredTensor& maps, const LatentConfig& latent, std::int64_t first,
                      std::int64_t end, float* target) {
  const std::int64_t nope = latent.nope_dim;
  visit_heads(first, end, latent.rank,
              [&](std::int64_t head, std::int64_t begin, std::int64_t count) {
                const std::int64_t row = head * (nope + latent.value_dim);
                read_transposed(maps, row, row + nope, begin, count, target, nope);
                target += count * nope;
              });
}

void read_latent_values(const StoredTensor& maps, const LatentConfig& latent, std::int64_t first,
                        std::int64_t end, float* target) {
  visit_heads(first, end, latent.value_dim,
              [&](std::int64_t head, std::int64_t begin, std::int64_t count) {
                const std::int64_t row =
                    head * (latent.nope_dim + latent.value_dim) + latent.nope_dim + begin;
                maps.read(row, row + count, 0, latent.rank, target);
                target += count * latent.rank;
              });
}

}  // namespace kvzap::model
