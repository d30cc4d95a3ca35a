#include "model/own_head.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "gguf/model_file.hpp"
#include "model/families/family.hpp"
#include "model/weight_store.hpp"

namespace kvzap::model {
namespace {

/// Whether both matrices (rows, columns) have the same values.
bool are_equal(const StoredTensor& a, const StoredTensor& b, std::int64_t rows,
               std::int64_t columns) {
  const auto plain_a = a.plain(), plain_b = b.plain();
  if (plain_a && plain_b && plain_a->dtype == plain_b->dtype) {
    const auto bytes = static_cast<std::size_t>(rows * columns) * size_of(plain_a->dtype);
    return std::memcmp(plain_a->data, plain_b->data, bytes) == 0;
  }
  std::vector<float> row_a(static_cast<std::size_t>(columns)), row_b(row_a.size());
  for (std::int64_t row = 0; row < rows; ++row) {
    a.read(row, row + 1, 0, columns, row_a.data());
    b.read(row, row + 1, 0, columns, row_b.data());
    if (row_a != row_b) return false;
  }
  return true;
}

/// Opens the weights; null if that fails, which loading them reports.
std::unique_ptr<WeightStore> try_open(const std::filesystem::path& model) {
  try {
    return open_weights(model);
  } catch (const Error&) {
    return nullptr;
  }
}

}  // namespace

void tie_missing_head(const std::filesystem::path& model, ModelConfig& config) {
  if (config.tie_word_embeddings || gguf::is_gguf(model)) return;
  const TensorNames& names = family_of(config).tensors;
  const auto store = try_open(model);
  config.tie_word_embeddings = store && store->has(fmt::format("{}.weight", names.embedding)) &&
                               !store->has(fmt::format("{}.weight", names.head));
}

void untie_own_head(const std::filesystem::path& model, ModelConfig& config) {
  if (!config.tie_word_embeddings || gguf::is_gguf(model)) return;
  const TensorNames& names = family_of(config).tensors;
  const std::string own = fmt::format("{}.weight", names.head);
  const std::string shared = fmt::format("{}.weight", names.embedding);
  const std::vector<std::int64_t> shape = {config.vocab_size, config.hidden_size};
  std::unique_ptr<StoredTensor> head, embedding;
  const auto store = try_open(model);
  if (!store) return;
  try {
    if (!store->has(own) || !store->has(shared)) return;
    embedding = store->at(shared, shape);
  } catch (const Error&) {
    return;
  }
  try {
    head = store->at(own, shape);
  } catch (const Error&) {
    config.tie_word_embeddings = false;  // loading the head tells why
    return;
  }
  const bool are_same = are_equal(*head, *embedding, config.vocab_size, config.hidden_size);
  head->release();
  embedding->release();
  if (are_same) return;
  config.tie_word_embeddings = false;
  config.warnings.push_back(
      fmt::format("{} differs from {}: it is the output head, although config.json sets "
                  "tie_word_embeddings to true",
                  head->description(), shared));
}

}  // namespace kvzap::model
