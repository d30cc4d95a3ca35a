#include <fmt/format.h>

#include <kvzap/engine/step_batch.hpp>

namespace kvzap {

void StepBatch::add(SequenceId sequence, const std::vector<TokenId>& tokens, const StepRule& rule,
                    StepOutput output, const std::vector<TokenDraw>& draws) {
  if (tokens.empty()) {
    throw Error(fmt::format("step: no tokens for sequence {}; expected at least one", sequence));
  }
  for (const Span& span : m_spans) {
    if (span.sequence == sequence) {
      throw Error(fmt::format("step: sequence {} twice in one step", sequence));
    }
  }
  const std::size_t n_draws = output == StepOutput::all_drawn ? tokens.size()
                              : output == StepOutput::drawn   ? 1
                                                              : 0;
  if (draws.size() != n_draws) {
    throw Error(fmt::format("step: {} draws for sequence {}; expected {}", draws.size(), sequence,
                            n_draws));
  }
  m_spans.push_back({sequence, static_cast<std::int64_t>(m_tokens.size()),
                     static_cast<std::int64_t>(tokens.size()), rule, output, draws});
  try {
    m_tokens.insert(m_tokens.end(), tokens.begin(), tokens.end());
  } catch (...) {
    m_spans.pop_back();
    throw;
  }
}

StepResult StepResult::after(std::size_t index, std::size_t count) const {
  StepResult one;
  if (!all_argmax.empty()) one.argmax = all_argmax.at(index);
  if (!all_drawn.empty()) one.drawn = all_drawn.at(index);
  const auto size = static_cast<std::ptrdiff_t>(logits.size() / count);
  const auto first = logits.begin() + static_cast<std::ptrdiff_t>(index) * size;
  one.logits.assign(first, first + size);
  return one;
}

void StepBatch::clear() {
  m_spans.clear();
  m_tokens.clear();
}

}  // namespace kvzap
