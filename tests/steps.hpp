// Steps of one kind, as most tests want them.
#pragma once

#include <kvzap/engine/step_batch.hpp>
#include <vector>

namespace kvzap::test {

/// Logits after the last token of one sequence, on rank 0.
template <class Decoder>
std::vector<float> step_logits(Decoder& decoder, SequenceId sequence,
                               const std::vector<TokenId>& tokens, const StepRule& rule = {}) {
  return decoder.step(StepBatch(sequence, tokens, rule, StepOutput::logits)).front().logits;
}

/// The token with the largest logit after the last token of one sequence, on every rank.
template <class Decoder>
TokenId step_argmax(Decoder& decoder, SequenceId sequence, const std::vector<TokenId>& tokens,
                    const StepRule& rule = {}) {
  return decoder.step(StepBatch(sequence, tokens, rule, StepOutput::argmax)).front().argmax;
}

/// One token for each sequence.
inline StepBatch single_tokens(const std::vector<SequenceId>& sequences,
                               const std::vector<TokenId>& tokens, const StepRule& rule,
                               StepOutput output) {
  StepBatch batch;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    batch.add(sequences[i], {tokens.at(i)}, rule, output);
  }
  return batch;
}

}  // namespace kvzap::test
