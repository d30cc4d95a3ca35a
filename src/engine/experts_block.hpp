// Feed-forward parts of which a router chooses some for each token.
#pragma once

#include "engine/expert_routes.hpp"
#include "engine/mixers.hpp"

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

 private:
  void sum_experts(Step& step, int layer, const linalg::Matrix& x, const linalg::Matrix& y);
  void add_identities(Step& step, const linalg::Matrix& x, const linalg::Matrix& y);
  void run_shared(Step& step, int layer, const linalg::Matrix& x, const linalg::Matrix& y);

  ExpertRoutes m_routes;
  linalg::Vector m_outputs;                   // the sum
  linalg::Vector m_inputs, m_expert_outputs;  // of the tokens of one expert
  linalg::Vector m_shared_logits;             // of the shared expert's gate: (token, 1)
};

}  // namespace kvzap::engine
