// Latent attention (LatentConfig) in GGUF files: metadata and tensors.
#pragma once

#include <cstdint>
#include <kvzap/model/model_config.hpp>
#include <memory>

#include "model/gguf_fields.hpp"
#include "model/weight_store.hpp"

namespace kvzap::model {

/// The rows of the sizes of latent attention.
void latent_head(GgufFields& f);
/// The rows of yarn in files of latent attention: RoPE leaves the lengths of queries and keys, and
/// a key has the factor that multiplies the scores of attention.
void latent_yarn(GgufFields& f);

// Rows of families.

void deepseek_v2_rows(GgufFields& f);
void deepseek_v3_rows(GgufFields& f);
void youtu_rows(GgufFields& f);
void mistral4_rows(GgufFields& f);
void minicpm3_rows(GgufFields& f);

// What tells these families apart in files of the architecture deepseek2.

bool is_youtu(GgufFields& f);
bool is_deepseek_v2(GgufFields& f);
bool is_mistral4(GgufFields& f);

/// Returns the checkpoint's tensor with the maps of keys and values of each head (kv_b_proj), which
/// files hold in two: `keys` of shape (heads, rank, nope_dim), `values` (heads, value_dim, rank).
std::unique_ptr<StoredTensor> joined_latent_maps(std::unique_ptr<StoredTensor> keys,
                                                 std::unique_ptr<StoredTensor> values,
                                                 const LatentConfig& latent);

/// Read rows `first` to `end` - 1 of these two tensors from the checkpoint's tensor `maps`.
void read_latent_keys(const StoredTensor& maps, const LatentConfig& latent, std::int64_t first,
                      std::int64_t end, float* target);
void read_latent_values(const StoredTensor& maps, const LatentConfig& latent, std::int64_t first,
                        std::int64_t end, float* target);

}  // namespace kvzap::model
