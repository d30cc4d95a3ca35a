#include "session/conversation_state.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "files/decimal.hpp"
#include "files/json_file.hpp"
#include "files/quote.hpp"

namespace kvzap::session {
namespace {

using nlohmann::json;
using nlohmann::ordered_json;

/// Visits the recorded fields of a report: without the seconds, which another process measured.
template <class Cache, class Visit>
void each_field(Cache& cache, const Visit& visit) {
  visit("tokens", cache.tokens);
  visit("kept_rows", cache.kept);
  visit("prunes_layers", cache.prunes);
  visit("non_finite_scores", cache.non_finite_scores);
  visit("full_bytes", cache.full_bytes);
  visit("live_bytes", cache.live_bytes);
  visit("allocated_bytes", cache.allocated_bytes);
  visit("returned_bytes", cache.returned_bytes);
  visit("peak_allocated_bytes", cache.peak_allocated_bytes);
}

ordered_json json_of(const CacheReport& cache) {
  ordered_json value;
  each_field(cache, [&](const char* name, const auto& field) { value[name] = field; });
  return value;
}

CacheReport cache_of(const json& value, const SnapshotHeader& header) {
  CacheReport cache;
  each_field(cache, [&](const std::string& name, auto& field) {
    const bool may_lack = name == "prunes_layers";  // of older versions
    if (!may_lack || value.contains(name)) value.at(name).get_to(field);
  });
  const bool fits = static_cast<std::int64_t>(cache.kept.size()) == header.n_layers &&
                    std::all_of(cache.kept.begin(), cache.kept.end(), [&](const auto& heads) {
                      return static_cast<std::int64_t>(heads.size()) == header.n_kv_heads;
                    });
  if (!cache.prunes.empty() && cache.prunes.size() != cache.kept.size()) {
    throw Error(fmt::format("prunes_layers: expected {} flags", cache.kept.size()));
  }
  if (!fits) {
    throw Error(fmt::format("kept_rows: expected {} layers of {} KV heads", header.n_layers,
                            header.n_kv_heads));
  }
  return cache;
}

StopReason reason_from_name(const std::string& name) {
  for (const StopReason reason :
       {StopReason::stop_id, StopReason::max_new_tokens, StopReason::context_full}) {
    if (name == name_of(reason)) return reason;
  }
  throw Error(
      fmt::format("stop_reason is {}; expected stop_id, max_new_tokens or context_full", name));
}

/// Converts bytes of the same rows to another value type.
void convert(CacheReport& cache, DType from, DType to) {
  for (std::int64_t* bytes : {&cache.full_bytes, &cache.live_bytes, &cache.allocated_bytes,
                              &cache.returned_bytes, &cache.peak_allocated_bytes}) {
    *bytes =
        *bytes / static_cast<std::int64_t>(size_of(from)) * static_cast<std::int64_t>(size_of(to));
  }
}

}  // namespace

std::string_view stop_reason_of(const AnsweredQuestion& answered) {
  return answered.is_interrupted ? "interrupted" : name_of(answered.answer.stop_reason);
}

ConversationState read_state(const json& value, const SnapshotHeader& header) {
  ConversationState state;
  for (const json& question : value.at("questions")) {
    state.texts.push_back(question.at("text"));
    state.questions.push_back(question.at("ids"));
  }
  for (const json& answer : value.at("answers")) {
    AnsweredQuestion answered;
    if (state.answers.size() >= state.questions.size()) {
      throw Error(
          fmt::format("answers: there are more than questions, {}", state.questions.size()));
    }
    answered.question = state.texts[state.answers.size()];
    answered.text = answer.at("text");
    answer.at("ids").get_to(answered.answer.tokens);
    const std::string stop_reason = answer.at("stop_reason");
    answered.is_interrupted = stop_reason == "interrupted";
    if (!answered.is_interrupted) answered.answer.stop_reason = reason_from_name(stop_reason);
    answered.answer.question_tokens =
        static_cast<std::int64_t>(state.questions[state.answers.size()].size());
    answered.answer.cache = cache_of(answer.at("cache"), header);
    answered.is_from_snapshot = true;
    state.answers.push_back(std::move(answered));
  }
  if (value.contains("context")) state.context = cache_of(value.at("context"), header);
  state.dtype = dtype_from_name(value.at("dtype").get<std::string>());
  value.at("policy").get_to(state.policy);
  if (value.contains("system")) state.system = value.at("system");
  if (value.contains("generation_hash")) state.generation = value.at("generation_hash");
  if (value.contains("threshold")) {
    const json& found = value.at("threshold");
    state.looked_up.emplace();
    found.at("evict_ratio").get_to(state.looked_up->evict_ratio);
    found.at("file").get_to(state.looked_up->file);
    // Stored as text, because it may be infinite.
    const auto text = found.at("value").get<std::string>();
    if (files::read_real(text, state.looked_up->threshold) != files::DecimalFault::none) {
      throw Error(
          fmt::format("threshold.value: expected a number, found {}", files::in_quotes(text)));
    }
  }
  return state;
}

void convert(ConversationState& state, DType to) {
  for (AnsweredQuestion& answered : state.answers) convert(answered.answer.cache, state.dtype, to);
  if (state.context) convert(*state.context, state.dtype, to);
  state.dtype = to;
}

std::string to_json_text(const ConversationState& state) {
  ordered_json value = {{"questions", ordered_json::array()}, {"answers", ordered_json::array()}};
  for (std::size_t i = 0; i < state.questions.size(); ++i) {
    value["questions"].push_back({{"text", state.texts[i]}, {"ids", state.questions[i]}});
  }
  for (const AnsweredQuestion& answered : state.answers) {
    value["answers"].push_back({{"text", answered.text},
                                {"ids", answered.answer.tokens},
                                {"stop_reason", stop_reason_of(answered)},
                                {"cache", json_of(answered.answer.cache)}});
  }
  if (state.context) value["context"] = json_of(*state.context);
  value["dtype"] = name_of(state.dtype);
  value["policy"] = state.policy;
  if (state.system) value["system"] = *state.system;
  if (state.generation) value["generation_hash"] = *state.generation;
  if (state.looked_up) {
    value["threshold"] = {{"evict_ratio", state.looked_up->evict_ratio},
                          {"value", fmt::format("{}", state.looked_up->threshold)},
                          {"file", state.looked_up->file}};
  }
  return files::json_text(value);
}

}  // namespace kvzap::session
