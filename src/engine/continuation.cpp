#include <algorithm>
#include <cmath>
#include <kvzap/engine/continuation.hpp>
#include <limits>
#include <utility>

#include "engine/likely_tokens.hpp"

namespace kvzap {

std::string_view name_of(StopReason reason) {
  switch (reason) {
    case StopReason::stop_id:
      return "stop_id";
    case StopReason::max_new_tokens:
      return "max_new_tokens";
    case StopReason::context_full:
      return "context_full";
  }
  return "unknown";
}

namespace {

/// A grammar says where an answer may end: its stop ids are drawn there alone.
SamplingOptions with_ends(SamplingOptions sampling, const std::vector<TokenId>& stop_ids) {
  if (sampling.grammar) {
    sampling.end_tokens.insert(sampling.end_tokens.end(), stop_ids.begin(), stop_ids.end());
  }
  return sampling;
}

}  // namespace

Continuation::Continuation(const SamplingOptions& sampling, StopRules rules, std::int64_t lookup)
    : m_sampler(with_ends(sampling, rules.stop_ids)),
      m_lookup(lookup),
      m_is_plain(sampling.is_plain()),
      m_is_draw(sampling.is_draw()),
      m_rules(std::move(rules)) {}

void Continuation::append_prompt(const std::vector<TokenId>& tokens) {
  m_sampler.append_prompt(tokens);
  for (const TokenId token : tokens) m_lookup.append(token);
}

StepOutput Continuation::output(bool may_draw) const {
  if (m_is_plain) return StepOutput::argmax;
  return m_is_draw && may_draw ? StepOutput::drawn : StepOutput::logits;
}

std::vector<TokenDraw> Continuation::draws(StepOutput output, std::size_t tokens) const {
  if (output == StepOutput::all_drawn) return m_sampler.next_draws(tokens);
  if (output == StepOutput::drawn) return m_sampler.next_draws(1);
  return {};
}

TokenId Continuation::draw(const StepResult& result) {
  if (m_is_plain && result.logits.empty()) return result.argmax;
  if (!m_is_draw || !result.logits.empty()) return m_sampler(result.logits);
  if (result.drawn >= 0) m_sampler.use_draw();
  return result.drawn;
}

void Continuation::append(TokenId token) {
  m_tokens.push_back(token);
  m_sampler.append(token);
  m_is_complete = m_sampler.is_complete();
  m_lookup.append(token);
}

std::vector<TokenId> Continuation::draft(std::int64_t positions, std::int64_t most) {
  // The last token of an answer does not run.
  most = std::min(most, m_rules.max_new_tokens - static_cast<std::int64_t>(m_tokens.size()) - 1);
  if (m_rules.max_tokens > 0) most = std::min(most, m_rules.max_tokens - positions - 1);
  return m_lookup.draft(most);
}

std::optional<StopReason> Continuation::end(std::int64_t positions) const {
  const auto& stops = m_rules.stop_ids;
  const bool has_any = !m_tokens.empty();
  if (has_any && std::find(stops.begin(), stops.end(), m_tokens.back()) != stops.end()) {
    return StopReason::stop_id;
  }
  if (has_any && m_is_complete) return StopReason::stop_id;
  if (static_cast<std::int64_t>(m_tokens.size()) >= m_rules.max_new_tokens) {
    return StopReason::max_new_tokens;
  }
  if (has_any && m_rules.max_tokens > 0 && positions >= m_rules.max_tokens) {
    return StopReason::context_full;
  }
  return {};
}

double log_normalizer(const float* logits, std::int64_t vocabulary) {
  engine::LikelyTokens likely;
  likely.read(logits, static_cast<std::size_t>(vocabulary));
  if (!likely.is_finite()) return std::numeric_limits<double>::quiet_NaN();
  return likely.largest() + std::log(likely.total(1));
}

}  // namespace kvzap
