// Feed-forward parts of which a router chooses some for each token.
#pragma once

#include <optional>

#include "engine/expert_routes.hpp"
#include "engine/mixers.hpp"
#include "linalg/device/chosen_products.hpp"

namespace kvzap::engine {

/// The sum of the chosen experts' outputs, and of the shared expert's. Each rank has a part of each
/// expert, so all ranks read the same bytes, however the tokens are spread.
class ExpertsBlock final : public ChannelMixer {
 public:
  void reserve(Step& step) override;
  linalg::Matrix run(Step& step, int layer, const linalg::Matrix& x) override;
  void release() override;

  /// The parts of `run`, for experts whose router has another input: chooses the experts of each
  /// row, and computes the output with those chosen last. Called within Step::locally.
  void route(Step& step, int layer, const linalg::Matrix& x);
  linalg::Matrix run_routed(Step& step, int layer, const linalg::Matrix& x);

  /// Returns whether the tokens of the step that has reserved memory last run without waiting: few
  /// of them, on a device, with plain weights. Kernels over all choices then take each token's
  /// experts; otherwise the host sorts tokens by expert.
  bool by_choices() const { return m_by_choices; }

 private:
  /// The maps of a layer's experts.
  struct LayerMaps {
    linalg::ChosenMaps gate_up, down;
  };

  void sum_experts(Step& step, int layer, const linalg::Matrix& x, const linalg::Matrix& y);
  void add_identities(Step& step, const linalg::Matrix& x, const linalg::Matrix& y);
  void run_chosen(Step& step, int layer, const linalg::Matrix& x, const linalg::Matrix& y);
  bool may_choose(const Step& step) const;
  void reserve_chosen(Step& step);
  void run_shared(Step& step, int layer, const linalg::Matrix& x, const linalg::Matrix& y);

  ExpertRoutes m_routes;
  linalg::Vector m_outputs;                   // the sum
  linalg::Vector m_inputs, m_expert_outputs;  // of the tokens of one expert
  linalg::Vector m_shared_logits;             // of the shared expert's gate: (token, 1)
  bool m_by_choices = false;
  std::optional<bool> m_serve_choices;  // ChosenMaps::serve of all layers'
  std::vector<LayerMaps> m_maps;        // (layer), made for the first step of few tokens
};

}  // namespace kvzap::engine
