#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <kvzap/engine/sampler.hpp>
#include <limits>
#include <locale>
#include <sstream>
#include <utility>

#include "engine/draw_token.hpp"

namespace kvzap {
namespace {

// Larger penalties have no further effect. Within this limit products stay floats.
constexpr double largest_penalty = 1e6;

void check_penalties(const SamplingOptions& options, const SamplingNames& name) {
  if (!(options.repetition_penalty >= 1 / largest_penalty &&
        options.repetition_penalty <= largest_penalty)) {
    throw Error(fmt::format("{} is {}; expected {} to {} (1: none)", name("repetition_penalty"),
                            options.repetition_penalty, 1 / largest_penalty, largest_penalty));
  }
  for (const auto& [field, penalty] : {std::pair("presence_penalty", options.presence_penalty),
                                       {"frequency_penalty", options.frequency_penalty}}) {
    if (!(std::fabs(penalty) <= largest_penalty)) {
      throw Error(fmt::format("{} is {}; expected {} to {} (0: none)", name(field), penalty,
                              -largest_penalty, largest_penalty));
    }
  }
  if (options.repeat_last_n < -1) {
    throw Error(fmt::format("{} is {}; expected 0 or more, or -1 for all tokens",
                            name("repeat_last_n"), options.repeat_last_n));
  }
}

void check_forbidden(const SamplingOptions& options) {
  const auto check = [](TokenId token, const char* of) {
    if (token < 0) throw Error(fmt::format("{} has token {}; expected 0 or more", of, token));
  };
  for (const TokenId token : options.suppress_tokens) check(token, "suppress_tokens");
  for (const auto& word : options.bad_words) {
    if (word.empty()) throw Error("bad_words_ids has a word without tokens; expected one or more");
    for (const TokenId token : word) check(token, "bad_words_ids");
  }
  for (const TokenId token : options.end_tokens) check(token, "end_tokens");
  for (const auto& [token, bias] : options.logit_bias) {
    check(token, "logit_bias");
    if (!std::isfinite(bias))
      throw Error("logit_bias has a bias that is not finite; expected a number");
  }
}

}  // namespace

bool SamplingOptions::changes_logits() const {
  const bool has_penalty =
      repetition_penalty != 1 || presence_penalty != 0 || frequency_penalty != 0;
  const bool has_least = min_new_tokens > 0 && !end_tokens.empty();
  return (has_penalty && repeat_last_n != 0) || !suppress_tokens.empty() || !bad_words.empty() ||
         !logit_bias.empty() || has_least || grammar;
}

void check(const SamplingOptions& options, const SamplingNames& names) {
  const SamplingNames name =
      names ? names : [](std::string_view field) { return std::string(field); };
  if (!(options.temperature >= 0) || !std::isfinite(options.temperature)) {
    throw Error(
        fmt::format("{} is {}; expected 0 or more", name("temperature"), options.temperature));
  }
  if (options.top_k < 0) {
    throw Error(fmt::format("{} is {}; expected 0 or more", name("top_k"), options.top_k));
  }
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    throw Error(
        fmt::format("{} is {}; expected more than 0 and at most 1", name("top_p"), options.top_p));
  }
  if (!(options.min_p >= 0 && options.min_p <= 1)) {
    throw Error(fmt::format("{} is {}; expected 0 to 1", name("min_p"), options.min_p));
  }
  check_penalties(options, name);
  check_forbidden(options);
}

Sampler::Sampler(const SamplingOptions& options)
    : m_options(options), m_changes_logits(options.changes_logits()), m_random(options.seed) {
  check(options);
  if (options.grammar) m_grammar.emplace(options.grammar);
}

// Appends a token. All tokens of the prompt precede the first of the answer.
void Sampler::take(TokenId token) {
  const std::size_t index = m_tokens.size();
  m_tokens.push_back(token);
  if (m_options.repeat_last_n == 0) return;
  const auto is_answered = [&](std::size_t i) { return i >= m_prompt_tokens ? 1 : 0; };
  Count& added = m_counts[token];
  added.all += 1;
  added.answered += is_answered(index);
  const auto last = static_cast<std::size_t>(m_options.repeat_last_n);
  if (m_options.repeat_last_n < 0 || index < last) return;
  const std::size_t gone = index - last;
  const auto found = m_counts.find(m_tokens[gone]);
  found->second.all -= 1;
  found->second.answered -= is_answered(gone);
  if (found->second.all == 0) m_counts.erase(found);
}

void Sampler::append_prompt(const std::vector<TokenId>& tokens) {
  if (!m_changes_logits) return;
  if (m_tokens.size() != m_prompt_tokens) {
    throw Error("sampler: the prompt comes before the tokens of the answer");
  }
  m_prompt_tokens += tokens.size();
  for (const TokenId token : tokens) take(token);
}

void Sampler::append(TokenId token) {
  const auto& ends = m_options.end_tokens;
  if (m_grammar && std::find(ends.begin(), ends.end(), token) == ends.end()) {
    try {
      m_grammar->append(token);
    } catch (const Error& error) {
      m_failure = error.what();
    }
  }
  if (m_changes_logits) take(token);
}

bool Sampler::is_complete() const {
  if (!m_grammar || !m_failure.empty()) return false;
  try {
    return m_grammar->must_end();
  } catch (const Error&) {
    return false;  // the next draw throws it again
  }
}

void Sampler::change(std::vector<float>& logits) const {
  const auto size = static_cast<std::int64_t>(logits.size());
  const auto repetition = static_cast<float>(m_options.repetition_penalty);
  const auto presence = static_cast<float>(m_options.presence_penalty);
  const auto frequency = static_cast<float>(m_options.frequency_penalty);
  for (const auto& [token, count] : m_counts) {
    if (token < 0 || token >= size) continue;
    float& logit = logits[static_cast<std::size_t>(token)];
    logit = logit < 0 ? logit * repetition : logit / repetition;
    if (count.answered == 0) continue;
    logit -= frequency * static_cast<float>(count.answered);
    logit -= presence;
  }
  for (const auto& [token, bias] : m_options.logit_bias) {
    if (token < size) logits[static_cast<std::size_t>(token)] += bias;
  }
  const auto forbid = [&](TokenId token) {
    if (token < size)
      logits[static_cast<std::size_t>(token)] = -std::numeric_limits<float>::infinity();
  };
  for (const auto& word : m_options.bad_words) {
    if (word.size() > m_tokens.size() + 1) continue;
    const auto before = static_cast<std::ptrdiff_t>(word.size()) - 1;
    if (std::equal(word.begin(), word.end() - 1, m_tokens.end() - before)) forbid(word.back());
  }
  for (const TokenId token : m_options.suppress_tokens) forbid(token);
  const auto answered = static_cast<std::int64_t>(m_tokens.size() - m_prompt_tokens);
  if (m_grammar) forbid_by_grammar(logits);
  if (answered >= m_options.min_new_tokens && (!m_grammar || m_grammar->may_end())) return;
  for (const TokenId token : m_options.end_tokens) forbid(token);
}

void Sampler::forbid_by_grammar(std::vector<float>& logits) const {
  constexpr float forbidden = -std::numeric_limits<float>::infinity();
  constexpr std::size_t word_bits = 64;
  std::vector<std::pair<std::size_t, float>> ends;  // other logits than these are those of texts
  for (const TokenId token : m_options.end_tokens) {
    const auto index = static_cast<std::size_t>(token);
    if (index < logits.size()) ends.emplace_back(index, logits[index]);
  }
  const std::vector<std::uint64_t>& allowed = m_grammar->allowed();
  for (std::size_t begin = 0; begin < logits.size(); begin += word_bits) {
    const std::size_t word = begin / word_bits;
    const std::uint64_t bits = word < allowed.size() ? allowed[word] : 0;
    if (bits == ~std::uint64_t{0}) continue;
    const std::size_t count = std::min(word_bits, logits.size() - begin);
    for (std::size_t i = 0; i < count; ++i) {
      if (((bits >> i) & 1) == 0) logits[begin + i] = forbidden;
    }
  }
  for (const auto& [index, logit] : ends) logits[index] = logit;
}

std::string Sampler::state() const {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text << m_random;
  return text.str();
}

void Sampler::set_state(const std::string& state) {
  std::istringstream text(state);
  text.imbue(std::locale::classic());
  std::mt19937_64 random;
  if (!(text >> random) || !(text >> std::ws).eof()) {
    throw Error("the state of the random numbers is not that of a std::mt19937_64");
  }
  m_random = random;
}

TokenId Sampler::operator()(const std::vector<float>& original) {
  if (!m_failure.empty()) throw Error(m_failure);
  thread_local engine::DrawScratch scratch;
  engine::LikelyTokens& likely = scratch.likely;
  likely.read(original.data(), original.size());
  if (!likely.is_finite()) return -1;
  if (m_changes_logits) {
    m_changed = original;
    change(m_changed);
    likely.read(m_changed.data(), m_changed.size());
    if (!likely.is_finite()) return -1;
  }
  if (m_options.temperature == 0) return likely.best();
  const std::vector<float>& logits = m_changes_logits ? m_changed : original;
  return engine::draw_token(logits.data(), logits.size(), draw_of(m_random), scratch);
}

// std::uniform_real_distribution differs between libraries; 53 random bits do not.
TokenDraw Sampler::draw_of(std::mt19937_64& random) const {
  const double uniform = static_cast<double>(random() >> 11) * 0x1p-53;
  return {m_options.temperature, m_options.top_k, m_options.top_p, m_options.min_p, uniform};
}

std::vector<TokenDraw> Sampler::next_draws(std::size_t count) const {
  std::mt19937_64 random = m_random;
  std::vector<TokenDraw> draws;
  draws.reserve(count);
  while (draws.size() < count) draws.push_back(draw_of(random));
  return draws;
}

void Sampler::use_draw() { m_random.discard(1); }

}  // namespace kvzap
