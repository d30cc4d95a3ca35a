// Quantises weights while they are loaded.
#pragma once

#include <kvzap/model/model_config.hpp>
#include <memory>
#include <string>

#include "gguf/architectures.hpp"
#include "gguf/type_mixture.hpp"
#include "model/weight_store.hpp"

namespace kvzap::model {

/// The matrices of another store in the types that a mixture gives them. Those that the other store
/// keeps in blocks of as few bytes stay as they are.
class EncodingStore final : public WeightStore {
 public:
  EncodingStore(std::unique_ptr<WeightStore> stored, const gguf::TypeMixture& mixture,
                const ModelConfig& config);

  std::unique_ptr<StoredTensor> at(std::string_view name,
                                   const std::vector<std::int64_t>& shape) const override;
  std::unique_ptr<StoredTensor> slice(const std::string& name, const TensorSlice& slice,
                                      std::int64_t rows, std::int64_t columns) const override;
  bool has(std::string_view name) const override { return m_stored->has(name); }

 private:
  std::unique_ptr<StoredTensor> encoded(std::string_view name,
                                        const std::vector<std::int64_t>& shape,
                                        std::unique_ptr<StoredTensor> stored) const;

  std::unique_ptr<WeightStore> m_stored;
  const gguf::TypeMixture& m_mixture;
  const gguf::Architecture* m_architecture;
  std::int64_t m_layers;
  bool m_is_tied;
  std::int64_t m_heads_per_group;
  std::int64_t m_experts;
};

}  // namespace kvzap::model
