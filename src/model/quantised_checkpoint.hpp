// Quantised weights in safetensors files, widened as they are read.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "model/quantised_config.hpp"
#include "model/weight_store.hpp"

namespace kvzap::model {

/// A checkpoint with quantization_config. The tensors that a layer has decide whether it is
/// quantised, so that layers outside the quantisation (modules_to_not_convert) are plain. Parts of
/// a quantised matrix LAYER.weight of shape (outputs, inputs):
///
/// - fp8: LAYER.weight (F8_E4M3) and LAYER.weight_scale_inv or LAYER.weight_scale (F32, F16 or
/// BF16).
///   The scales have shape (), (1), (outputs), (outputs, 1) or one value for each block. A weight
///   is the product of value and scale.
/// - mxfp4: LAYER.weight_blocks (U8, (outputs, inputs / 32, 16)) and LAYER.weight_scales (U8,
///   (outputs, inputs / 32)). A matrix of experts has more extents before these.
/// - awq: LAYER.qweight (I32, (inputs, outputs / 8)), LAYER.qzeros (I32, (groups, outputs / 8)) and
///   LAYER.scales (F16, (groups, outputs)). A weight is (value - zero) * scale.
/// - gptq: LAYER.qweight (I32, (inputs / 8, outputs)), the same qzeros and scales, and LAYER.g_idx
///   (I32, (inputs)), the group of each input. Without it inputs are grouped in order.
class QuantisedStore final : public WeightStore {
 public:
  QuantisedStore(SafetensorsFolder files, const QuantisedConfig& config)
      : m_plain(std::move(files)), m_config(config) {}

  std::unique_ptr<StoredTensor> at(std::string_view name,
                                   const std::vector<std::int64_t>& shape) const override;
  bool has(std::string_view name) const override;

 private:
  /// The tensor whose presence means that `name` is quantised, or nullptr.
  const TensorInfo* quantised(std::string_view name) const;

  bool scales_are_numbers(const TensorInfo& scales) const;

  SafetensorsStore m_plain;
  QuantisedConfig m_config;
  // Of scales that were looked through: all experts of a layer share a tensor.
  mutable std::mutex m_mutex;
  mutable std::map<const void*, bool> m_are_numbers;
};

}  // namespace kvzap::model
