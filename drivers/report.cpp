#include "report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/json_file.hpp"

namespace kvzap::driver {
namespace {

using nlohmann::ordered_json;

std::int64_t sum(const std::vector<std::int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), std::int64_t{0});
}

std::vector<double> evict_ratios(const CacheReport& cache) {
  std::vector<double> ratios;
  for (std::size_t l = 0; l < cache.kept.size(); ++l) {
    ratios.push_back(cache.evict_ratio(static_cast<int>(l)));
  }
  return ratios;
}

/// How much is evicted, and when again.
void add_budget(ordered_json& json, const RunOptions& options) {
  // JSON has no infinity; a threshold of plus or minus infinity is written as text.
  if (options.threshold && std::isfinite(static_cast<float>(*options.threshold))) {
    json["threshold"] = *options.threshold;
  } else if (options.threshold) {
    json["threshold"] = *options.threshold > 0 ? "inf" : "-inf";
  }
  if (options.evict_ratio) json["evict_ratio"] = *options.evict_ratio;
  if (options.keep_tokens) json["keep_tokens"] = *options.keep_tokens;
  if (!options.kv_budget.empty()) {
    json["kv_budget_bytes"] = parse_bytes(options.kv_budget, "--kv-budget");
  }
  if (options.decode_every > 0) json["decode_every"] = options.decode_every;
  if (options.decode_keep) json["decode_keep"] = *options.decode_keep;
  if (options.decode_evict_ratio) json["decode_evict_ratio"] = *options.decode_evict_ratio;
}

/// The same for people; empty without a budget.
std::string budget_text(const RunOptions& options) {
  std::string text;
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  if (options.threshold) add(fmt::format("threshold {}", *options.threshold));
  if (options.evict_ratio) add(fmt::format("evict ratio {}", *options.evict_ratio));
  if (options.keep_tokens) add(fmt::format("{} rows a head", *options.keep_tokens));
  if (!options.kv_budget.empty()) {
    add(human_bytes(parse_bytes(options.kv_budget, "--kv-budget")) + " of KV");
  }
  if (options.prune_after == "question") add("after the question");
  if (options.decode_keep) {
    add(fmt::format("every {} tokens to {} rows a head", options.decode_every,
                    *options.decode_keep));
  }
  if (options.decode_evict_ratio) {
    add(fmt::format("every {} tokens to an evict ratio of {}", options.decode_every,
                    *options.decode_evict_ratio));
  }
  return text;
}

ordered_json cache_json(const CacheReport& cache) {
  return {{"tokens", cache.tokens},
          {"evict_ratio", cache.evict_ratio()},
          {"evict_ratio_per_layer", evict_ratios(cache)},
          {"kept_rows", cache.kept},
          {"non_finite_scores", cache.non_finite_scores},
          {"kv",
           {{"full_bytes", cache.full_bytes},
            {"live_bytes", cache.live_bytes},
            {"allocated_bytes", cache.allocated_bytes},
            {"returned_bytes", cache.returned_bytes},
            {"peak_allocated_bytes", cache.peak_allocated_bytes}}}};
}

double per_second(std::int64_t count, double seconds) { return seconds > 0 ? count / seconds : 0; }

// Reports have the seconds since the beginning.
double scoring_seconds(const CacheReport& cache, const CacheReport& before) {
  return std::max(0.0, cache.score_seconds - before.score_seconds);
}
double pruning_seconds(const CacheReport& cache, const CacheReport& before) {
  return std::max(0.0, cache.prune_seconds - before.prune_seconds);
}

// The first new token comes from the question's step; only the later ones are decode steps.
double decode_ms(const Answer& answer) {
  return answer.tokens.size() < 2 ? 0 : 1e3 * answer.decode_seconds / (answer.tokens.size() - 1);
}

/// What the run goes on with, what it has written, and whether it has come to its end.
void add_snapshots(ordered_json& json, const RunReport& report) {
  if (report.resumed) {
    const ResumedFrom& from = *report.resumed;
    json["resumed"] = {{"file", from.file},
                       {"version", from.kvzap_version},
                       {"bytes", from.bytes},
                       {"tokens", from.tokens},
                       {"context_tokens", from.context_tokens},
                       {"answer_tokens", from.answer_tokens},
                       {"seconds", from.seconds}};
  }
  if (!report.snapshots.empty()) json["snapshots"] = ordered_json::array();
  for (const WrittenSnapshot& written : report.snapshots) {
    json["snapshots"].push_back({{"file", written.file},
                                 {"tokens", written.tokens},
                                 {"bytes", written.bytes},
                                 {"seconds", written.seconds},
                                 {"waiting_seconds", written.waiting_seconds}});
  }
  if (report.signal == 0) return;
  json["signal"] = report.signal;
  if (report.stopped_in.empty()) return;
  json["stopped"] = {
      {"in", report.stopped_in}, {"after", report.stopped_after}, {"of", report.stopped_of}};
  if (!report.unfinished) return;
  json["stopped"]["answer"] = {{"question", report.unfinished->question},
                               {"text", report.unfinished->text},
                               {"ids", report.unfinished->answer.tokens}};
}

std::string snapshots_text(const RunReport& report) {
  std::string text;
  if (report.resumed) {
    text += fmt::format("resumed from {}: {}, {} tokens, read in {:.2f} s\n", report.resumed->file,
                        human_bytes(report.resumed->bytes), report.resumed->tokens,
                        report.resumed->seconds);
  }
  if (report.snapshots.empty()) return text;
  const WrittenSnapshot& last = report.snapshots.back();
  text += fmt::format("snapshot {}: {}, {} tokens, written in {:.2f} s", last.file,
                      human_bytes(last.bytes), last.tokens, last.seconds);
  if (report.snapshots.size() > 1) {
    double waiting = 0;
    for (const WrittenSnapshot& written : report.snapshots) waiting += written.waiting_seconds;
    text += fmt::format(", the last of {}, for which the run waited {:.2f} s",
                        report.snapshots.size(), waiting);
  }
  return text + "\n";
}

}  // namespace

std::string_view stop_reason_of(const AnsweredQuestion& answered) {
  return answered.is_interrupted ? "interrupted" : name_of(answered.answer.stop_reason);
}

std::string human_bytes(std::int64_t bytes) {
  constexpr const char* units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  double value = static_cast<double>(bytes);
  int unit = 0;
  while (value >= 999.95 && unit < 5) {
    value /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

ordered_json to_json(const RunReport& report, const RunOptions& options) {
  ordered_json json;
  json["format"] = "kvzap.run";
  json["format_version"] = 1;
  json["version"] = report.version;
  json["model"] = {{"path", options.model},
                   {"architecture", report.model.architecture},
                   {"layers", report.model.num_hidden_layers},
                   {"kv_heads", report.model.num_key_value_heads},
                   {"query_heads", report.model.num_attention_heads},
                   {"head_dim", report.model.head_dim}};
  if (options.layers) json["model"]["all_layers"] = report.all_layers;
  if (options.random_weights) json["model"]["random_weights"] = *options.random_weights;
  if (report.model.rope_scaling) json["model"]["rope_scaling"] = rope_json(report.model);
  const CacheOptions& cache = report.cache_options;
  json["options"] = {{"dtype", options.dtype},
                     {"prune", name_of(cache.prune)},
                     {"prefill", name_of(cache.prefill)},
                     {"prune_after", options.prune_after},
                     {"window", options.window},
                     {"sink", cache.sink},
                     {"page_rows", cache.page_rows},
                     {"page_order", options.page_order},
                     {"trim", cache.trim}};
  json["options"].update(sampling_json(options.sampling, options.sampling_flags));
  if (cache.prefill == PrefillMode::sparse) json["options"]["chunk"] = cache.chunk;
  if (!report.surrogate_kind.empty()) {
    json["surrogate"] = {{"path", options.surrogate}, {"kind", report.surrogate_kind}};
  }
  if (!report.policy.empty()) {
    json["policy"] = report.policy;
    add_budget(json["options"], options);
    if (report.looked_up) {
      json["options"]["evict_ratio"] = report.looked_up->evict_ratio;
      json["options"]["thresholds_file"] = report.looked_up->file;
    }
  }
  json["ranks"] = report.ranks;
  json["context"] = cache_json(report.context);
  json["context"]["prefill_seconds"] = report.prefill_seconds;
  // Parts of the prefill's; after the question of the first answer's.
  json["context"]["scoring_seconds"] = report.context.score_seconds;
  json["context"]["pruning_seconds"] = report.context.prune_seconds;
  if (!report.policy.empty()) json["context"]["kv"]["full_at_first"] = report.is_full_at_first;
  json["context"]["prefill_tokens_per_second"] =
      per_second(report.prefill_tokens, report.prefill_seconds);
  json["answers"] = ordered_json::array();
  // After the question: what was spent on the first context is part of the first answer.
  const CacheReport nothing;
  const bool is_after_question = cache.prune_after == PruneMoment::question;
  const CacheReport* before = is_after_question ? &nothing : &report.context;
  for (const AnsweredQuestion& item : report.answers) {
    ordered_json answer = {{"question", item.question},
                           {"text", item.text},
                           {"ids", item.answer.tokens},
                           {"stop_reason", stop_reason_of(item)},
                           {"question_tokens", item.answer.question_tokens},
                           {"new_tokens", item.answer.tokens.size()},
                           {"question_seconds", item.answer.question_seconds},
                           {"decode_seconds", item.answer.decode_seconds},
                           {"decode_ms_per_token", decode_ms(item.answer)},
                           {"scoring_seconds", scoring_seconds(item.answer.cache, *before)},
                           {"pruning_seconds", pruning_seconds(item.answer.cache, *before)},
                           {"cache", cache_json(item.answer.cache)}};
    if (item.is_from_snapshot) answer["from_snapshot"] = true;
    json["answers"].push_back(std::move(answer));
    before = &item.answer.cache;
  }
  json["memory"] = {{"weight_bytes", sum(report.weight_bytes)},
                    {"weight_bytes_per_rank", report.weight_bytes},
                    {"peak_rss_bytes", sum(report.peak_rss_bytes)},
                    {"peak_rss_bytes_per_rank", report.peak_rss_bytes}};
  json["load_seconds"] = report.load_seconds;
  if (report.texts > 0) {
    json["texts"] = {{"count", report.texts}, {"seconds", report.texts_seconds}};
  }
  add_snapshots(json, report);
  return json;
}

std::string to_text(const RunReport& report, const RunOptions& options) {
  std::string text;
  const auto line = [&](const std::string& what) { text += what + "\n"; };
  // Stopped before there were any rows: what is there to say is how far it came.
  if (report.signal != 0 && report.context.kept.empty() && report.answers.empty()) {
    return "\n" + snapshots_text(report);
  }
  const CacheReport& end =
      report.answers.empty() ? report.context : report.answers.back().answer.cache;
  line("");
  if (report.cache_options.prune != PruneMode::none) {
    std::string budget = budget_text(options);
    if (report.looked_up) {
      budget += fmt::format(" for an evict ratio of {}, by {}", report.looked_up->evict_ratio,
                            report.looked_up->file);
    }
    line(fmt::format("policy: {}{}{}", report.policy, budget.empty() ? "" : "; ", budget));
    line("layer  evicted after context  evicted at end  kept rows (shortest - longest head)");
    for (std::size_t l = 0; l < end.kept.size(); ++l) {
      const auto [least, most] = std::minmax_element(end.kept[l].begin(), end.kept[l].end());
      line(fmt::format("{:5}  {:20.1f}%  {:13.1f}%  {} - {} of {}", l,
                       100 * report.context.evict_ratio(static_cast<int>(l)),
                       100 * end.evict_ratio(static_cast<int>(l)), *least, *most, end.tokens));
    }
    line(fmt::format(" mean  {:20.1f}%  {:13.1f}%", 100 * report.context.evict_ratio(),
                     100 * end.evict_ratio()));
  }
  line(fmt::format(
      "KV cache: {} had none been evicted, {} live, {} allocated, {} returned, {} at its "
      "peak",
      human_bytes(end.full_bytes), human_bytes(end.live_bytes), human_bytes(end.allocated_bytes),
      human_bytes(end.returned_bytes), human_bytes(end.peak_allocated_bytes)));
  if (!report.policy.empty() && report.is_full_at_first) {
    line(
        "note: what stays is chosen over all layers, after the question or after a repeat, so that "
        "the peak is the full cache (and a chunk of the repeat)");
  }
  if (end.non_finite_scores > 0) {
    line(fmt::format("warning: {} pairs have a score that is NaN or infinite; they were kept",
                     end.non_finite_scores));
  }
  line(fmt::format("memory: {} of weights, peak resident {} on {} rank{}",
                   human_bytes(sum(report.weight_bytes)), human_bytes(sum(report.peak_rss_bytes)),
                   report.ranks, report.ranks == 1 ? "" : "s"));
  if (report.cache_options.prune_after == PruneMoment::question) {
    line(fmt::format("time: load {:.2f} s; the context of {} tokens runs with each question",
                     report.load_seconds, report.context_tokens));
  } else {
    line(fmt::format("time: load {:.2f} s, context of {} tokens {:.2f} s ({:.0f} tokens/s)",
                     report.load_seconds, report.prefill_tokens, report.prefill_seconds,
                     per_second(report.prefill_tokens, report.prefill_seconds)));
  }
  if (!report.policy.empty()) {
    line(fmt::format("      of that scoring {:.3f} s, choosing and evicting {:.3f} s",
                     report.context.score_seconds, report.context.prune_seconds));
  }
  if (report.texts > 0) {
    line(fmt::format("      before the context the policy's {} text{} {:.2f} s", report.texts,
                     report.texts == 1 ? "" : "s", report.texts_seconds));
  }
  for (const AnsweredQuestion& item : report.answers) {
    if (item.is_from_snapshot) continue;
    line(fmt::format("      question of {} tokens {:.3f} s, {} new tokens, {:.2f} ms each",
                     item.answer.question_tokens, item.answer.question_seconds,
                     item.answer.tokens.size(), decode_ms(item.answer)));
  }
  text += snapshots_text(report);
  return text;
}

std::string stop_text(const RunReport& report, const RunOptions& options) {
  if (options.snapshot.empty() || report.snapshots.empty()) {
    std::string where = "before anything was run";
    const auto tokens =
        fmt::format("after {} of {} tokens", report.stopped_after, report.stopped_of);
    if (report.stopped_in == "load") {
      where = "while weights were loaded";
    } else if (report.stopped_in == "context") {
      where = fmt::format("in the context, {}", tokens);
    } else if (report.stopped_in == "texts") {
      where = fmt::format("in the policy's texts, {}", tokens);
    } else if (report.stopped_in == "repeat") {
      where = fmt::format("in the repeat of the context, {}", tokens);
    } else if (report.stopped_in == "question") {
      where = fmt::format("in question {}, {}", report.answers.size() + 1, tokens);
    } else if (report.stopped_in == "answer") {
      where = fmt::format("in answer {}, {}", report.answers.size() + 1, tokens);
    }
    return fmt::format("stopped by signal {} {}", report.signal, where);
  }
  const bool has_values = options.snapshot_content.empty() || options.snapshot_content == "all";
  return fmt::format("stopped by signal {}: {} has {} tokens{}", report.signal, options.snapshot,
                     report.snapshots.empty() ? 0 : report.snapshots.back().tokens,
                     has_values ? fmt::format("; kvzap run --resume {} goes on", options.snapshot)
                                : " but not their keys and values: no run can go on from it");
}

std::string to_text(const MemoryPlan& plan, const ModelConfig& model, DType dtype,
                    std::int64_t tokens, double evict_ratio) {
  std::string text = fmt::format("{}: {} layers, {} KV heads of {}, {} tokens, {}\n",
                                 model.architecture, model.num_hidden_layers,
                                 model.num_key_value_heads, model.head_dim, tokens, name_of(dtype));
  constexpr const char* line = "{:>6}  {:>10}  {:>10}  {:>18}  {:>26}  {:>11}  {:>9}\n";
  text += fmt::format(line, "rank", "weights", "KV full",
                      fmt::format("KV at {:.1f}% evicted", 100 * evict_ratio),
                      "one layer's dense K and V", "activations", "attention");
  const auto row = [&](const std::string& name, const auto& part) {
    text += fmt::format(line, name, human_bytes(part.weights), human_bytes(part.kv_full),
                        human_bytes(part.kv_kept), human_bytes(part.dense_layer),
                        human_bytes(part.activations), human_bytes(part.attention));
  };
  for (std::size_t r = 0; r < plan.ranks.size(); ++r) row(fmt::format("{}", r), plan.ranks[r]);
  row("all", plan);
  return text;
}

ordered_json to_json(const MemoryPlan& plan, const RunOptions& options, std::int64_t tokens,
                     double evict_ratio) {
  const auto part = [](const auto& p) {
    return ordered_json{{"weight_bytes", p.weights},         {"kv_full_bytes", p.kv_full},
                        {"kv_kept_bytes", p.kv_kept},        {"dense_layer_bytes", p.dense_layer},
                        {"activation_bytes", p.activations}, {"attention_bytes", p.attention}};
  };
  ordered_json json = {{"format", "kvzap.plan"}, {"format_version", 1},
                       {"model", options.model}, {"dtype", options.dtype},
                       {"tokens", tokens},       {"evict_ratio", evict_ratio},
                       {"total", part(plan)},    {"ranks", ordered_json::array()}};
  for (const auto& rank : plan.ranks) json["ranks"].push_back(part(rank));
  return json;
}

std::vector<std::vector<std::int64_t>> read_kept_rows(const std::string& file,
                                                      const ModelConfig& model) {
  const auto json = detail::read_json_object(file);
  const auto fail = [&](const std::string& what) -> void {
    throw Error(fmt::format("{}: field context.kept_rows: {}", file, what));
  };
  const nlohmann::json::json_pointer pointer("/context/kept_rows");
  if (!json.contains(pointer)) fail("missing; expected the --json file of an earlier run");
  const auto& rows = json.at(pointer);
  const auto layers = static_cast<std::size_t>(model.num_hidden_layers);
  const auto heads = static_cast<std::size_t>(model.num_key_value_heads);
  if (!rows.is_array() || rows.size() != layers) {
    fail(fmt::format("expected {} layers as the model has, found {}", layers,
                     rows.is_array() ? fmt::format("{}", rows.size()) : rows.type_name()));
  }
  std::vector<std::vector<std::int64_t>> kept;
  for (const auto& layer : rows) {
    if (!layer.is_array() || layer.size() != heads) {
      fail(fmt::format("layer {}: expected {} KV heads as the model has, found {}", kept.size(),
                       heads,
                       layer.is_array() ? fmt::format("{}", layer.size()) : layer.type_name()));
    }
    kept.emplace_back();
    for (const auto& count : layer) {
      if (!count.is_number_integer() || count.get<std::int64_t>() < 0) {
        fail(fmt::format("layer {}: expected whole numbers, found {}", kept.size() - 1,
                         count.dump()));
      }
      kept.back().push_back(count.get<std::int64_t>());
    }
  }
  return kept;
}

}  // namespace kvzap::driver
