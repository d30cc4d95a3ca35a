// The output head: tokens and logits.
#pragma once

#include "engine/step.hpp"
#include "engine/token_draws.hpp"

namespace kvzap::engine {

class OutputBlock {
 public:
  void reserve(Step& step);
  /// Called before `compute`, which may be recorded: brings the settings of draws to the device.
  void begin(const Step& step);
  /// Launches what computes this rank's part of the outputs. With hidden states, or rows that are
  /// not consecutive, it waits.
  void compute(Step& step);
  /// Called after `compute`. Returns the results of the step's spans: for the last token, or for
  /// each token. Tokens are reduced over ranks; logits are gathered on rank 0; hidden states are
  /// equal on all ranks, and rank 0 returns its own. Only these leave a device. Collective; throws
  /// on every rank if any rank has failed in the step.
  std::vector<StepResult> run(Step& step);
  void release() { m_rows = m_added = {}; }

 private:
  void read(const Step& step);
  void take_tokens(const Step& step);
  void read_hidden(const Step& step, const linalg::Matrix& normed);
  void gather_logits(const Step& step);

  linalg::Vector m_rows, m_added;  // rows of Step::h and Step::pending that are not consecutive
  Kokkos::View<std::int64_t*, MemorySpace> m_device_rows;
  Kokkos::View<std::int64_t*, MemorySpace> m_tokens;  // keys of argmaxes, and drawn tokens
  TokenDraws m_draws;
  std::vector<std::int64_t> m_host_tokens;  // (output), then the step's outcome
  Kokkos::View<float*, base::StagingSpace> m_local_logits;
  std::vector<float> m_gathered_logits;
  std::vector<float> m_hidden;               // (output, hidden), on rank 0
  std::vector<std::int64_t> m_logit_counts;  // of each rank
  std::vector<StepResult> m_results;
  std::vector<SequenceId> m_sequences;
};

}  // namespace kvzap::engine
