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

// The first new token comes from the question's step; only the later ones are decode steps.
double decode_ms(const Answer& answer) {
  return answer.tokens.size() < 2 ? 0 : 1e3 * answer.decode_seconds / (answer.tokens.size() - 1);
}

}  // namespace

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
  const CacheOptions& cache = report.cache_options;
  json["options"] = {{"dtype", options.dtype},
                     {"prune", name_of(cache.prune)},
                     {"prefill", name_of(cache.prefill)},
                     {"window", options.window},
                     {"sink", cache.sink},
                     {"page_rows", cache.page_rows},
                     {"page_order", options.page_order},
                     {"trim", cache.trim},
                     {"temp", options.sampling.temperature},
                     {"top_k", options.sampling.top_k},
                     {"top_p", options.sampling.top_p},
                     {"seed", options.sampling.seed}};
  if (cache.prefill == PrefillMode::sparse) json["options"]["chunk"] = cache.chunk;
  if (!report.surrogate_kind.empty()) {
    json["surrogate"] = {{"path", options.surrogate}, {"kind", report.surrogate_kind}};
    // JSON has no infinity; a threshold of plus or minus infinity is written as text.
    const double threshold = cache.threshold;
    if (std::isfinite(threshold)) {
      json["options"]["threshold"] = options.threshold.value_or(threshold);
    } else {
      json["options"]["threshold"] = threshold > 0 ? "inf" : "-inf";
    }
  }
  json["ranks"] = report.ranks;
  json["context"] = cache_json(report.context);
  json["context"]["prefill_seconds"] = report.prefill_seconds;
  json["context"]["prefill_tokens_per_second"] =
      per_second(report.context_tokens, report.prefill_seconds);
  json["answers"] = ordered_json::array();
  for (const AnsweredQuestion& item : report.answers) {
    ordered_json answer = {{"question", item.question},
                           {"text", item.text},
                           {"ids", item.answer.tokens},
                           {"stop_reason", name_of(item.answer.stop_reason)},
                           {"question_tokens", item.answer.question_tokens},
                           {"new_tokens", item.answer.tokens.size()},
                           {"question_seconds", item.answer.question_seconds},
                           {"decode_seconds", item.answer.decode_seconds},
                           {"decode_ms_per_token", decode_ms(item.answer)},
                           {"cache", cache_json(item.answer.cache)}};
    json["answers"].push_back(std::move(answer));
  }
  json["memory"] = {{"weight_bytes", sum(report.weight_bytes)},
                    {"weight_bytes_per_rank", report.weight_bytes},
                    {"peak_rss_bytes", sum(report.peak_rss_bytes)},
                    {"peak_rss_bytes_per_rank", report.peak_rss_bytes}};
  json["load_seconds"] = report.load_seconds;
  return json;
}

std::string to_text(const RunReport& report) {
  std::string text;
  const auto line = [&](const std::string& what) { text += what + "\n"; };
  const CacheReport& end =
      report.answers.empty() ? report.context : report.answers.back().answer.cache;
  line("");
  if (report.cache_options.prune != PruneMode::none) {
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
  if (end.non_finite_scores > 0) {
    line(fmt::format("warning: {} pairs have a score that is NaN or infinite; they were kept",
                     end.non_finite_scores));
  }
  line(fmt::format("memory: {} of weights, peak resident {} on {} rank{}",
                   human_bytes(sum(report.weight_bytes)), human_bytes(sum(report.peak_rss_bytes)),
                   report.ranks, report.ranks == 1 ? "" : "s"));
  line(fmt::format("time: load {:.2f} s, context of {} tokens {:.2f} s ({:.0f} tokens/s)",
                   report.load_seconds, report.context_tokens, report.prefill_seconds,
                   per_second(report.context_tokens, report.prefill_seconds)));
  for (const AnsweredQuestion& item : report.answers) {
    line(fmt::format("      question of {} tokens {:.3f} s, {} new tokens, {:.2f} ms each",
                     item.answer.question_tokens, item.answer.question_seconds,
                     item.answer.tokens.size(), decode_ms(item.answer)));
  }
  return text;
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

ordered_json to_json(const MemoryPlan& plan, const RunOptions& options, std::int64_t tokens) {
  const auto part = [](const auto& p) {
    return ordered_json{{"weight_bytes", p.weights},         {"kv_full_bytes", p.kv_full},
                        {"kv_kept_bytes", p.kv_kept},        {"dense_layer_bytes", p.dense_layer},
                        {"activation_bytes", p.activations}, {"attention_bytes", p.attention}};
  };
  ordered_json json = {{"format", "kvzap.plan"}, {"format_version", 1},
                       {"model", options.model}, {"dtype", options.dtype},
                       {"tokens", tokens},       {"evict_ratio", options.evict_ratio},
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
