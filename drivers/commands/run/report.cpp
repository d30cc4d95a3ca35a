#include "commands/run/report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <numeric>

#include "files/counted.hpp"
#include "files/json_field.hpp"
#include "files/json_file.hpp"

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

/// Adds the budget and its moments.
void add_budget(ordered_json& json, const Pruning& pruning) {
  const Pruning::Amount& amount = pruning.amount;
  // JSON has no infinity; a threshold of plus or minus infinity is written as text.
  if (amount.threshold && std::isfinite(static_cast<float>(*amount.threshold))) {
    json["threshold"] = *amount.threshold;
  } else if (amount.threshold) {
    json["threshold"] = *amount.threshold > 0 ? "inf" : "-inf";
  }
  if (amount.evict_ratio) json["evict_ratio"] = *amount.evict_ratio;
  if (amount.keep_tokens) json["keep_tokens"] = *amount.keep_tokens;
  if (amount.kv_bytes) json["kv_budget_bytes"] = *amount.kv_bytes;
  if (pruning.decode.every > 0) json["decode_every"] = pruning.decode.every;
  if (pruning.decode.keep) json["decode_keep"] = *pruning.decode.keep;
  if (pruning.decode.evict_ratio) json["decode_evict_ratio"] = *pruning.decode.evict_ratio;
}

/// Describes the budget and its moments for people; empty without a budget.
std::string budget_text(const Pruning& pruning) {
  std::string text;
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : ", ") + part; };
  const Pruning::Amount& amount = pruning.amount;
  if (amount.threshold) add(fmt::format("threshold {:.3f}", *amount.threshold));
  if (amount.evict_ratio) add(fmt::format("evict ratio {}", *amount.evict_ratio));
  if (amount.keep_tokens) add(files::counted(*amount.keep_tokens, "row") + " a head");
  if (amount.kv_bytes) add(human_bytes(*amount.kv_bytes) + " of KV");
  if (pruning.moment == PruneMoment::question) add("after the question");
  if (pruning.decode.keep) {
    add(fmt::format("every {} to {} a head", files::counted(pruning.decode.every, "token"),
                    files::counted(*pruning.decode.keep, "row")));
  }
  if (pruning.decode.evict_ratio) {
    add(fmt::format("every {} to an evict ratio of {}",
                    files::counted(pruning.decode.every, "token"), *pruning.decode.evict_ratio));
  }
  return text;
}

ordered_json cache_json(const CacheReport& cache, const std::vector<Quantiles>& scores) {
  ordered_json json = {{"tokens", cache.tokens},
                       {"evict_ratio", cache.evict_ratio()},
                       {"evict_ratio_per_layer", evict_ratios(cache)},
                       {"kept_rows", cache.kept},
                       {"non_finite_scores", cache.non_finite_scores},
                       {"kv",
                        {{"full_bytes", cache.full_bytes},
                         {"live_bytes", cache.live_bytes},
                         {"allocated_bytes", cache.allocated_bytes},
                         {"returned_bytes", cache.returned_bytes},
                         {"peak_allocated_bytes", cache.peak_allocated_bytes},
                         {"moved_pages", cache.moved_pages}}}};
  for (int l = 0; l < static_cast<int>(cache.kept.size()); ++l) {
    if (!cache.is_pruned(l)) json["unpruned_layers"].push_back(l);
  }
  if (scores.empty()) return json;
  ordered_json& layers = json["score_quantiles_per_layer"];
  for (const Quantiles& layer : scores) layers.push_back(quantiles_json(layer));
  return json;
}

struct Scaled {
  double value;
  int unit;
};
constexpr const char* byte_units[] = {"B", "kB", "MB", "GB", "TB", "PB"};

Scaled scaled(std::int64_t bytes) {
  Scaled result{static_cast<double>(bytes), 0};
  while (result.value >= 999.95 && result.unit < 5) {
    result.value /= 1000;
    ++result.unit;
  }
  return result;
}

/// Formats "3.2 MB → 0.7 MB (−78 %)". Both use the larger one's unit, unless the smaller one would
/// be 0 in it.
std::string shrunk(std::int64_t full, std::int64_t live) {
  const Scaled before = scaled(full);
  const double after = static_cast<double>(live) / std::pow(1000, before.unit);
  constexpr double least_shown = 0.1;
  const std::string left = before.unit > 0 && after >= least_shown
                               ? fmt::format("{:.1f} {}", after, byte_units[before.unit])
                               : human_bytes(live);
  const double percent = 100 * (1 - static_cast<double>(live) / static_cast<double>(full));
  const bool is_rounded = percent >= 1 && percent < 99.5;
  return fmt::format("{} → {} (−{:.{}f} %)", human_bytes(full), left, percent, is_rounded ? 0 : 1);
}

std::string cache_text(const CacheReport& cache, bool prunes) {
  std::string text = "KV cache ";
  if (!prunes || cache.full_bytes == 0) {
    text += human_bytes(cache.live_bytes) + ", nothing evicted\n";
  } else {
    text += shrunk(cache.full_bytes, cache.live_bytes) + "\n";
  }
  text += fmt::format("         {} allocated (pages and windows), {} at its peak",
                      human_bytes(cache.allocated_bytes), human_bytes(cache.peak_allocated_bytes));
  const std::int64_t never = cache.full_bytes - cache.peak_allocated_bytes;
  if (never > 0) {
    text += fmt::format("\n         {} of the full cache were never allocated", human_bytes(never));
  }
  if (cache.returned_bytes > 0) {
    text += fmt::format("\n         {} returned to the system", human_bytes(cache.returned_bytes));
  }
  return text + "\n";
}

std::int64_t saturated_sum(std::initializer_list<std::int64_t> terms) {
  std::int64_t sum = 0;
  for (const std::int64_t term : terms) {
    if (__builtin_add_overflow(sum, term, &sum)) return std::numeric_limits<std::int64_t>::max();
  }
  return sum;
}

std::int64_t needed_of(const MemoryPlan::Rank& part, bool is_full_at_first) {
  const std::int64_t stored = is_full_at_first ? part.kv_unpruned : part.kv_kept;
  const std::int64_t kv = std::min(part.kv_full, saturated_sum({stored, part.dense_layer}));
  return saturated_sum({part.weights, kv, part.activations, part.attention});
}

/// Says whether the plan fits and, if not, which memory or number of nodes would suffice.
std::string node_text(const PlanReport& report) {
  const int ranks = report.ranks_on_node;
  const std::string of_ranks = files::counted(ranks, "rank");
  if (!report.is_known()) return "the available memory is not known here\n";
  std::string text =
      report.nodes == 1
          ? "this node: "
          : fmt::format("{} nodes; on the one with the least free memory: ", report.nodes);
  text += fmt::format("{} need{} {}, {} are available: {}\n", of_ranks, ranks == 1 ? "s" : "",
                      human_bytes(report.needed_on_node), human_bytes(report.available_on_node),
                      report.fits() ? "it fits" : "it does not fit");
  if (report.fits()) return text;
  if (report.nodes_that_fit > 0) {
    return text + fmt::format("{} like this one, with {} on each, would be enough\n",
                              files::counted(report.nodes_that_fit, "node"), of_ranks);
  }
  return text + fmt::format(
                    "no number of nodes like this one, with {} on each, would be enough: each rank "
                    "has at least one KV head\n",
                    of_ranks);
}

double per_second(std::int64_t count, double seconds) { return seconds > 0 ? count / seconds : 0; }

// Returns the seconds spent since `before`. Reports count seconds from the beginning.
double scoring_seconds(const CacheReport& cache, const CacheReport& before) {
  return std::max(0.0, cache.score_seconds - before.score_seconds);
}
double pruning_seconds(const CacheReport& cache, const CacheReport& before) {
  return std::max(0.0, cache.prune_seconds - before.prune_seconds);
}

// The first new token belongs to the question's step. Only later tokens are decode steps.
double decode_ms(const Answer& answer) {
  return answer.tokens.size() < 2 ? 0 : 1e3 * answer.decode_seconds / (answer.tokens.size() - 1);
}

/// Adds the snapshot from which the run resumed, the snapshots that it wrote, and whether it
/// reached its end.
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
    text += fmt::format("resumed from {}: {}, {}, read in {:.2f} s\n", report.resumed->file,
                        human_bytes(report.resumed->bytes),
                        files::counted(report.resumed->tokens, "token"), report.resumed->seconds);
  }
  if (report.snapshots.empty()) return text;
  const WrittenSnapshot& last = report.snapshots.back();
  text += fmt::format("snapshot {}: {}, {}, written in {:.2f} s", last.file,
                      human_bytes(last.bytes), files::counted(last.tokens, "token"), last.seconds);
  if (report.snapshots.size() > 1) {
    double waiting = 0;
    for (const WrittenSnapshot& written : report.snapshots) waiting += written.waiting_seconds;
    text += fmt::format(", the last of {}, for which the run waited {:.2f} s",
                        report.snapshots.size(), waiting);
  }
  return text + "\n";
}

}  // namespace

std::string cut_text(const Answer& answer) {
  const std::size_t tokens = answer.tokens.size();
  if (answer.stop_reason == StopReason::max_new_tokens && tokens > 0) {
    return fmt::format("was cut after {} (-n)", files::counted(tokens, "token"));
  }
  if (answer.stop_reason == StopReason::context_full) {
    return fmt::format("was cut after {}: the longest context accepted is full (-c)",
                       files::counted(tokens, "token"));
  }
  return "";
}

std::string human_bytes(std::int64_t bytes) {
  const auto [value, unit] = scaled(bytes);
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, byte_units[unit]);
}

std::string answer_heading(std::size_t number, const std::string& question) {
  constexpr std::size_t most_characters = 72;
  std::string line;
  std::size_t characters = 0;
  bool is_blank_due = false;
  for (std::size_t i = 0; i < question.size(); ++i) {
    const auto byte = static_cast<unsigned char>(question[i]);
    // line breaks and control characters, which move a terminal's cursor
    if (byte <= ' ' || byte == 0x7f) {
      is_blank_due = !line.empty();
      continue;
    }
    const bool begins_character = (byte >> 6) != 2;
    if (begins_character && characters + (is_blank_due ? 1 : 0) >= most_characters) {
      line += "…";
      break;
    }
    if (is_blank_due) line += ' ';
    characters += (is_blank_due ? 1 : 0) + (begins_character ? 1 : 0);
    is_blank_due = false;
    line += question[i];
  }
  return fmt::format("[{}] {}", number, line.empty() ? "(no question)" : line);
}

namespace {

void add_drafts(ordered_json& answer, const DraftCounts& drafts) {
  answer["drafted_tokens"] = drafts.drafted;
  answer["accepted_tokens"] = drafts.accepted;
}

}  // namespace

ordered_json to_json(const RunReport& report, const RunOptions& options) {
  ordered_json json;
  json["format"] = "kvzap.run";
  json["format_version"] = 1;
  json["version"] = report.version;
  json["revision"] = report.revision;
  json["system"] = system_json(report.machine, report.ranks);
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
                     {"kv_type", kv_type_name(options.kv_type, options.dtype)},
                     {"prune", name_of(cache.mode())},
                     {"prefill", name_of(cache.pruning.prefill)},
                     {"prune_after", name_of(options.pruning.moment)},
                     {"window", options.pruning.window},
                     {"sink", cache.pruning.sink},
                     {"page_rows", cache.page_rows},
                     {"read_pages", name_of(cache.read_pages)},
                     {"balance", cache.balance},
                     {"trim", cache.trim}};
  json["options"].update(sampling_json(options.sampling, options.sampling_flags));
  json["options"]["lookup"] = options.lookup;
  if (cache.pruning.prefill == PrefillMode::sparse) json["options"]["chunk"] = cache.pruning.chunk;
  if (!report.surrogate_kind.empty()) {
    json["surrogate"] = {{"path", options.pruning.surrogate}, {"kind", report.surrogate_kind}};
  }
  if (!report.policy.empty()) {
    json["policy"] = report.policy;
    add_budget(json["options"], options.pruning);
    if (report.looked_up) {
      json["options"]["evict_ratio"] = report.looked_up->evict_ratio;
      json["options"]["thresholds_file"] = report.looked_up->file;
    }
  }
  json["flags"] = files::parse_own_json(report.flags);
  json["ranks"] = report.ranks;
  json["communication"] = ordered_json::array();
  for (const Traffic& rank : report.traffic) {
    json["communication"].push_back(
        {{"calls", rank.calls}, {"bytes", rank.bytes}, {"seconds", rank.seconds}});
  }
  json["context"] = cache_json(report.context, report.context_scores);
  if (options.json_token_ids) json["context"]["ids"] = report.context_ids;
  json["context"]["prefill_seconds"] = report.prefill_seconds;
  // This is part of the prefill's time. With pruning after the question, it is part of the first
  // answer's.
  json["context"]["scoring_seconds"] = report.context.score_seconds;
  json["context"]["pruning_seconds"] = report.context.prune_seconds;
  if (!report.policy.empty()) json["context"]["kv"]["full_at_first"] = report.is_full_at_first;
  json["context"]["prefill_tokens_per_second"] =
      per_second(report.prefill_tokens, report.prefill_seconds);
  json["answers"] = ordered_json::array();
  // With pruning after the question, time spent on the first context belongs to the first answer.
  const CacheReport nothing;
  const bool is_after_question = cache.pruning.moment == PruneMoment::question;
  const CacheReport* before = is_after_question ? &nothing : &report.context;
  for (std::size_t i = 0; i < report.answers.size(); ++i) {
    const AnsweredQuestion& item = report.answers[i];
    const auto scores =
        i < report.answer_scores.size() ? report.answer_scores[i] : std::vector<Quantiles>();
    ordered_json answer = {{"question", item.question},
                           {"text", item.text},
                           {"ids", item.answer.tokens},
                           {"stop_reason", session::stop_reason_of(item)},
                           {"question_tokens", item.answer.question_tokens},
                           {"new_tokens", item.answer.tokens.size()},
                           {"question_seconds", item.answer.question_seconds},
                           {"decode_seconds", item.answer.decode_seconds},
                           {"decode_ms_per_token", decode_ms(item.answer)},
                           {"scoring_seconds", scoring_seconds(item.answer.cache, *before)},
                           {"pruning_seconds", pruning_seconds(item.answer.cache, *before)},
                           {"cache", cache_json(item.answer.cache, scores)}};
    if (options.lookup > 0) add_drafts(answer, item.answer.drafts);
    if (options.json_token_ids && i < report.question_ids.size()) {
      answer["question_ids"] = report.question_ids[i];
    }
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

namespace {

/// Returns a row for each layer. Without `all`, models with many layers get only those that evict
/// least and most.
std::string layers_text(const CacheReport& context, const CacheReport& end, bool all) {
  constexpr std::size_t most_rows = 8, extremes = 3;
  std::vector<std::size_t> by_ratio;  // the pruned layers
  for (std::size_t l = 0; l < end.kept.size(); ++l) {
    if (end.is_pruned(static_cast<int>(l))) by_ratio.push_back(l);
  }
  const std::size_t layers = by_ratio.size();
  std::vector<bool> shown(end.kept.size(), false);
  if (all || layers <= most_rows) {
    for (const std::size_t l : by_ratio) shown[l] = true;
  } else {
    std::stable_sort(by_ratio.begin(), by_ratio.end(), [&](std::size_t a, std::size_t b) {
      return end.evict_ratio(static_cast<int>(a)) < end.evict_ratio(static_cast<int>(b));
    });
    for (std::size_t i = 0; i < extremes; ++i) {
      shown[by_ratio[i]] = shown[by_ratio[layers - 1 - i]] = true;
    }
  }
  std::string text;
  for (std::size_t l = 0; l < shown.size(); ++l) {
    if (!shown[l]) continue;
    const auto [least, most] = std::minmax_element(end.kept[l].begin(), end.kept[l].end());
    text += fmt::format("{:5}  {:20.1f}%  {:13.1f}%  {} - {} of {}\n", l,
                        100 * context.evict_ratio(static_cast<int>(l)),
                        100 * end.evict_ratio(static_cast<int>(l)), *least, *most, end.tokens);
  }
  const auto count = static_cast<std::size_t>(std::count(shown.begin(), shown.end(), true));
  if (count < layers) {
    text += fmt::format("       {} between these: --layer-table shows all\n",
                        files::counted(layers - count, "layer"));
  }
  if (layers < shown.size()) {
    text += fmt::format("       not pruned: {} without a view of all tokens\n",
                        files::counted(shown.size() - layers, "layer"));
  }
  return text;
}

/// Says why a cache that is pruned has all its pairs.
std::string untouched_text(const CacheReport& end, const Pruning& pruning) {
  if (end.evict_ratio() > 0) return "";
  if (pruning.amount.has_budget() && !pruning.looks_up_threshold()) {
    return fmt::format("note: nothing was evicted: the budget holds all pairs of {} tokens\n",
                       end.tokens);
  }
  const std::int64_t spared = pruning.window + pruning.sink;
  if (pruning.amount.threshold && end.tokens > spared) {
    return fmt::format("note: nothing was evicted: no pair scored below {:.3f} (--threshold)\n",
                       *pruning.amount.threshold);
  }
  if (end.tokens > spared) return "";
  return fmt::format(
      "note: nothing was evicted: of {} tokens, the last {} (--window){} stay in any case\n",
      end.tokens, pruning.window,
      pruning.sink > 0 ? fmt::format(" and the first {} (--sink)", pruning.sink) : "");
}

}  // namespace

std::string to_text(const RunReport& report, const RunOptions& options) {
  std::string text;
  const auto line = [&](const std::string& what) { text += what + "\n"; };
  // Without rows, the report only says how far the run came before it stopped.
  if (report.signal != 0 && report.context.kept.empty() && report.answers.empty()) {
    return "\n" + snapshots_text(report);
  }
  const CacheReport& end =
      report.answers.empty() ? report.context : report.answers.back().answer.cache;
  line("");
  for (std::size_t i = 0; i < report.answers.size() && !options.ignore_eos; ++i) {
    const AnsweredQuestion& item = report.answers[i];
    const std::string cut = item.is_interrupted ? "" : cut_text(item.answer);
    if (!cut.empty()) {
      line(fmt::format("note: answer{} {}",
                       report.answers.size() > 1 ? fmt::format(" [{}]", i + 1) : "", cut));
    }
  }
  if (report.cache_options.prunes()) {
    std::string budget = budget_text(options.pruning);
    if (report.looked_up) {
      budget += fmt::format(" for an evict ratio of {:.3f}, by {}", report.looked_up->evict_ratio,
                            report.looked_up->file);
    }
    line(fmt::format("policy   {}{}{}", report.policy, budget.empty() ? "" : "; ", budget));
    line("layer  evicted after context  evicted at end  tokens kept per KV head (fewest - most)");
    // Older files do not have the state after the context.
    const CacheReport& context = report.context.kept.empty() ? end : report.context;
    text += layers_text(context, end, options.layer_table);
    line(fmt::format(" mean  {:20.1f}%  {:13.1f}%", 100 * report.context.evict_ratio(),
                     100 * end.evict_ratio()));
    text += untouched_text(end, options.pruning);
  }
  text += cache_text(end, report.cache_options.prunes());
  if (!report.policy.empty() && report.is_full_at_first) {
    line(
        "         note: the rows that stay are chosen over all layers, after the question or after "
        "a repeat, so the peak is the full cache (and a chunk of the repeat)");
  }
  if (end.non_finite_scores > 0) {
    line(fmt::format("warning: {} with a NaN or infinite score: kept",
                     files::counted(end.non_finite_scores, "pair")));
  }
  line(fmt::format(
      "memory   {} at the peak{}, {} of them weights", human_bytes(sum(report.peak_rss_bytes)),
      report.ranks == 1 ? " of the process" : fmt::format("s of {} ranks", report.ranks),
      human_bytes(sum(report.weight_bytes))));
  if (report.ranks > 1) {
    std::int64_t bytes = 0;
    double least = report.traffic.front().seconds;
    for (const Traffic& rank : report.traffic) {
      bytes += rank.bytes;
      least = std::min(least, rank.seconds);
    }
    line(fmt::format("ranks    {} and {} each, at least {:.2f} s in them; {} moved",
                     files::counted(report.traffic.front().calls, "message"),
                     human_bytes(bytes / report.ranks), least,
                     files::counted(end.moved_pages, "page")));
  }
  if (report.cache_options.pruning.moment == PruneMoment::question) {
    line(fmt::format("time     load {:.2f} s; the context of {} is run with each question",
                     report.load_seconds, files::counted(report.context_tokens, "token")));
  } else if (report.prefill_tokens == 0) {
    line(fmt::format("time     load {:.2f} s", report.load_seconds));
  } else {
    line(fmt::format("time     load {:.2f} s, context of {} {:.2f} s ({:.0f} tokens/s)",
                     report.load_seconds, files::counted(report.prefill_tokens, "token"),
                     report.prefill_seconds,
                     per_second(report.prefill_tokens, report.prefill_seconds)));
  }
  if (!report.policy.empty()) {
    line(fmt::format("         of that scoring {:.3f} s, choosing and evicting {:.3f} s",
                     report.context.score_seconds, report.context.prune_seconds));
  }
  if (report.texts > 0) {
    line(fmt::format("         before the context: the policy's {} {:.2f} s",
                     files::counted(report.texts, "text"), report.texts_seconds));
  }
  for (std::size_t i = 0; i < report.answers.size(); ++i) {
    const AnsweredQuestion& item = report.answers[i];
    if (item.is_from_snapshot) continue;
    line(fmt::format(
        "         {}question of {} {:.3f} s, {}, {:.2f} ms each",
        report.answers.size() > 1 ? fmt::format("[{}] ", i + 1) : "",
        files::counted(item.answer.question_tokens, "token"), item.answer.question_seconds,
        files::counted(item.answer.tokens.size(), "new token"), decode_ms(item.answer)));
    const DraftCounts& drafts = item.answer.drafts;
    if (drafts.drafted == 0) continue;
    line(fmt::format("         {} of {} guessed tokens accepted (--lookup)", drafts.accepted,
                     drafts.drafted));
  }
  text += snapshots_text(report);
  return text;
}

std::string stop_text(const RunReport& report, const RunOptions& options) {
  if (options.snapshot.empty() || report.snapshots.empty()) {
    std::string where = "before the first step";
    const auto tokens =
        fmt::format("after {} of {} tokens", report.stopped_after, report.stopped_of);
    if (report.stopped_in == "load") {
      where = "while loading weights";
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
  return fmt::format("stopped by signal {}: {} has {}{}", report.signal, options.snapshot,
                     files::counted(report.snapshots.back().tokens, "token"),
                     has_values
                         ? fmt::format("; continue with kvzap run --resume {}", options.snapshot)
                         : " but not their keys and values: no run can continue from it");
}

std::int64_t needed_bytes(const MemoryPlan::Rank& part, bool is_full_at_first) {
  return needed_of(part, is_full_at_first);
}
std::int64_t needed_bytes(const MemoryPlan& part, bool is_full_at_first) {
  std::int64_t bytes = 0;
  for (const MemoryPlan::Rank& rank : part.ranks) {
    bytes = saturated_sum({bytes, needed_of(rank, is_full_at_first)});
  }
  return bytes;
}

std::string to_text(const PlanReport& report, const ModelConfig& model, DType dtype) {
  const MemoryPlan& plan = report.plan;
  const bool is_full = report.eviction.is_full_at_first;
  std::string text =
      fmt::format("{}: {}, {} of {}, {}, {}\n", model.architecture,
                  files::counted(model.num_hidden_layers, "layer"),
                  files::counted(model.num_key_value_heads, "KV head"), model.head_dim,
                  files::counted(report.tokens, "token"), name_of(dtype));
  constexpr const char* line = "{:>4}  {:>8}  {:>8}  {:>19}  {:>15}  {:>11}  {:>9}  {:>14}\n";
  text += fmt::format(line, "rank", "weights", "KV full",
                      fmt::format("KV at {:.1f}% evicted", 100 * report.eviction.ratio),
                      "KV of one layer", "activations", "attention", "needed at once");
  const auto row = [&](const std::string& name, const auto& part) {
    text += fmt::format(line, name, human_bytes(part.weights), human_bytes(part.kv_full),
                        human_bytes(part.kv_kept), human_bytes(part.dense_layer),
                        human_bytes(part.activations), human_bytes(part.attention),
                        human_bytes(needed_bytes(part, is_full)));
  };
  for (std::size_t r = 0; r < plan.ranks.size(); ++r) row(fmt::format("{}", r), plan.ranks[r]);
  row("all", plan);
  if (plan.kv_rings > 0) {
    text += fmt::format("of the KV cache, {} are of layers with windows or chunks, not pruned\n",
                        human_bytes(plan.kv_rings));
  }
  if (plan.states > 0) {
    text +=
        fmt::format("of the KV cache, {} are states of layers: of the sequence, and of a step\n",
                    human_bytes(plan.states));
  }
  text += is_full ? "needed at once: weights, the full cache, activations and attention\n"
                  : "needed at once: weights, the kept part of the cache, all keys and values of "
                    "one layer, activations\nand attention\n";
  return text + node_text(report);
}

ordered_json to_json(const PlanReport& report, const RunOptions& options) {
  const bool is_full = report.eviction.is_full_at_first;
  const auto part = [&](const auto& p) {
    return ordered_json{{"weight_bytes", p.weights},
                        {"kv_ring_bytes", p.kv_rings},
                        {"state_bytes", p.states},
                        {"kv_full_bytes", p.kv_full},
                        {"kv_unpruned_bytes", p.kv_unpruned},
                        {"kv_kept_bytes", p.kv_kept},
                        {"dense_layer_bytes", p.dense_layer},
                        {"activation_bytes", p.activations},
                        {"attention_bytes", p.attention},
                        {"needed_bytes", needed_bytes(p, is_full)}};
  };
  ordered_json json = {{"format", "kvzap.plan"},
                       {"format_version", 1},
                       {"model", options.model},
                       {"dtype", options.dtype},
                       {"kv_type", kv_type_name(options.kv_type, options.dtype)},
                       {"tokens", report.tokens},
                       {"evict_ratio", report.eviction.ratio},
                       {"full_at_first", is_full},
                       {"total", part(report.plan)},
                       {"ranks", ordered_json::array()}};
  for (const auto& rank : report.plan.ranks) json["ranks"].push_back(part(rank));
  ordered_json& node = json["node"];
  node = {{"nodes", report.nodes},
          {"ranks", report.ranks_on_node},
          {"needed_bytes", report.needed_on_node},
          {"available_bytes", nullptr},
          {"fits", nullptr}};
  if (!report.is_known()) return json;
  node["available_bytes"] = report.available_on_node;
  node["fits"] = report.fits();
  if (!report.fits()) {
    node["nodes_that_fit"] =
        report.nodes_that_fit > 0 ? ordered_json(report.nodes_that_fit) : ordered_json();
  }
  return json;
}

std::vector<std::vector<std::int64_t>> read_kept_rows(const std::string& file,
                                                      const ModelConfig& model) {
  const auto json = files::read_json_object(file);
  const files::JsonField report(json, file);
  // A calibration has kept rows for each window, descending, and evict ratio, ascending. Heads
  // differ most at the last.
  const files::JsonField calibrated = report.member("rows");
  const std::size_t ratios = calibrated.is_null() ? 0 : calibrated.array_size();
  const files::JsonField rows =
      (ratios > 0 ? calibrated.element(ratios - 1) : report.member("context")).member("kept_rows");
  if (rows.is_null()) rows.fail("the report (--json) of an earlier run, or of kvzap calibrate");
  const auto layers = static_cast<std::size_t>(model.num_hidden_layers);
  const auto heads = static_cast<std::size_t>(model.num_key_value_heads);
  if (rows.array_size() != layers) {
    files::throw_unexpected(rows.where(), fmt::format("{} layers as in the model", layers),
                            fmt::format("{}", rows.array_size()));
  }
  std::vector<std::vector<std::int64_t>> kept(layers);
  for (std::size_t l = 0; l < layers; ++l) {
    const files::JsonField layer = rows.element(l);
    if (layer.array_size() != heads) {
      files::throw_unexpected(layer.where(), fmt::format("{} KV heads as in the model", heads),
                              fmt::format("{}", layer.array_size()));
    }
    for (std::size_t h = 0; h < heads; ++h) kept[l].push_back(layer.element(h).integer(0));
  }
  return kept;
}

}  // namespace kvzap::driver
