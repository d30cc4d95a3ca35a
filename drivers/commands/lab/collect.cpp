#include "commands/lab/collect.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <kvzap/lab/collect.hpp>
#include <kvzap/lab/pairs.hpp>
#include <kvzap/model/chat_template.hpp>
#include <kvzap/model/memory_plan.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/stopwatch.hpp"
#include "commands/run/report.hpp"
#include "commands/support/model_loading.hpp"
#include "commands/support/setup.hpp"
#include "console/console.hpp"
#include "console/progress.hpp"
#include "console/signals.hpp"
#include "files/counted.hpp"
#include "files/json_file.hpp"
#include "files/temporary_file.hpp"
#include "options/options.hpp"
#include "parallel/message.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using base::Clock;
using base::seconds_since;

constexpr const char* statistics_option = "--query-statistics";

PairsPlan plan_of(const CollectOptions& options, const ModelSetup& setup) {
  PairsPlan plan;
  plan.model = options.model;
  plan.dtype = dtype_from_name(options.dtype);
  plan.hidden_size = setup.config.attention_inputs();
  plan.layers = static_cast<int>(setup.config.num_hidden_layers);
  plan.kv_heads = static_cast<int>(setup.config.num_key_value_heads);
  plan.compression = options.compression;
  const CollectRules& r = options.rules;
  plan.command = {{"--tokens-per-text", std::to_string(r.tokens_per_text)},
                  {"--min-tokens", std::to_string(r.min_tokens)},
                  {"--max-tokens", std::to_string(r.max_tokens)},
                  {"--per-subset", std::to_string(r.per_subset)},
                  {"--max-texts", std::to_string(r.max_texts)},
                  {"--seed", std::to_string(r.seed)}};
  if (options.random_weights) {
    plan.command["--random-weights"] = std::to_string(*options.random_weights);
  }
  if (options.weights != "stored") plan.command["--weights"] = options.weights;
  if (!options.rope.scaling.empty()) plan.command["--rope-scaling"] = options.rope.scaling;
  if (options.rope.scale) plan.command["--rope-scale"] = fmt::format("{}", *options.rope.scale);
  return plan;
}

/// Throws Error unless the prefill of the longest text fits in memory together with the weights and
/// `more` bytes of a rank.
void check_texts_fit(const CollectOptions& options, const ModelConfig& config,
                     const std::string& what, std::int64_t longest, std::int64_t more,
                     const Communicator& comm, int ranks_on_node) {
  const MemoryPlan planned =
      plan_memory(config, {dtype_from_name(options.dtype), longest, 0, comm.size(), 1, 0,
                           quantised_bytes(options, config, comm.size())});
  std::int64_t most = 0;
  for (const auto& rank : planned.ranks) {
    most = std::max(most, rank.weights + rank.activations + rank.attention + rank.dense_layer);
  }
  check_memory(
      most + more, ranks_on_node,
      fmt::format("weights and the longest text{}, {}", what, files::counted(longest, "token")));
}

/// Bytes of a text's pairs, counted twice: as collected, and while they wait for their chunk to
/// fill.
std::int64_t bytes_of_pairs(const CollectOptions& options, const ModelConfig& config,
                            std::int64_t most_pairs) {
  const auto value = static_cast<std::int64_t>(size_of(dtype_from_name(options.dtype)));
  return 2 * config.num_hidden_layers * most_pairs * config.attention_inputs() * value;
}

/// Bytes of a rank's sums and, on rank 0, of the file's content.
std::int64_t bytes_of_moments(const ModelConfig& config, int ranks) {
  const std::int64_t per_head = config.num_hidden_layers * config.head_dim * (config.head_dim + 1);
  const std::int64_t group = config.num_attention_heads / config.num_key_value_heads;
  const std::int64_t kv_heads_of_rank = (config.num_key_value_heads + ranks - 1) / ranks;
  return per_head * (8 * kv_heads_of_rank * group + 4 * config.num_attention_heads);
}

std::string skipped_text(const CollectTexts& texts) {
  std::vector<std::string> parts;
  const auto add = [&](std::int64_t count, const char* why) {
    if (count > 0) parts.push_back(fmt::format("{} {}", count, why));
  };
  add(texts.too_short, "too short");
  add(texts.too_long, "too long");
  add(texts.over_subset, "beyond --per-subset");
  add(texts.over_max_texts, "beyond --max-texts");
  return parts.empty() ? "" : fmt::format("; left out: {}", fmt::join(parts, ", "));
}

nlohmann::ordered_json skipped_json(const CollectTexts& texts) {
  return {{"too_short", texts.too_short},
          {"too_long", texts.too_long},
          {"over_per_subset", texts.over_subset},
          {"over_max_texts", texts.over_max_texts}};
}

void write_report(const CollectOptions& options, const nlohmann::ordered_json& json) {
  write_whole(options.json, files::json_lines(json));
  flush_stdout();
}

/// Inputs that both kinds of output share.
struct Work {
  const CollectOptions& options;
  const Communicator& comm;
  const std::string& version;
  const ModelSetup& setup;
  int ranks_on_node = 1;
  Clock::time_point start;

  bool talks() const { return comm.is_root() && !options.quiet; }
  void warn(const std::string& text) const {
    if (talks()) say("kvzap: {}\n", text);
  }
  void say_texts(std::int64_t used, const CollectTexts& texts) const {
    warn(fmt::format("{} of {} texts{}", used, texts.lines, skipped_text(texts)));
  }
};

/// The texts for a file of pairs, and their longest length. Reading them adds their plan to `plan`.
/// Collective; only rank 0 gets the texts.
struct PairTexts {
  CollectTexts texts;
  std::int64_t most_tokens = 0;
  std::int64_t most_pairs = 0;
};

PairTexts read_pair_texts(const Work& work, PairsPlan& plan) {
  const CollectOptions& options = work.options;
  PairTexts found;
  work.comm.agree_on_root([&] {
    check_writable(options.json);
    const Tokenizer tokenizer = Tokenizer::load(options.model);
    const ChatTemplate chat_template = ChatTemplate::detect(options.model);
    found.texts = read_collect_texts(options.texts, options.rules, tokenizer, chat_template,
                                     work.setup.config);
    plan.command["the texts' hash"] = found.texts.hash;
    plan.command["the model's hash"] = hash_of_model(options.model, !options.random_weights);
    plan.texts = found.texts.plan;
    for (const CollectText& text : found.texts.texts) {
      found.most_tokens = std::max(found.most_tokens, static_cast<std::int64_t>(text.ids.size()));
      found.most_pairs =
          std::max(found.most_pairs, static_cast<std::int64_t>(text.positions.size()));
    }
  });
  parallel::broadcast(work.comm, 0, found.most_tokens, found.most_pairs);
  return found;
}

/// Prints the result, and writes the report if one is requested. On rank 0.
void tell_pairs(const Work& work, const PairsPlan& plan, const CollectTexts& texts,
                const PairsWriter& writer, const CollectResult& result, double seconds) {
  const CollectOptions& options = work.options;
  if (work.talks() && result.texts > 0) {
    say("kvzap: {} of {} in {:.1f} s ({:.0f} tokens/s); {} has {}\n",
        files::counted(result.pairs, "pair"), files::counted(result.texts, "text"), seconds,
        static_cast<double>(result.tokens) / seconds, options.output, human_bytes(writer.bytes()));
  }
  if (options.json.empty()) return;
  write_report(options, {{"kvzap", work.version},
                         {"model", options.model},
                         {"texts_file", options.texts},
                         {"output", options.output},
                         {"ranks", work.comm.size()},
                         {"dtype", options.dtype},
                         {"layers", plan.layers},
                         {"hidden_size", plan.hidden_size},
                         {"kv_heads", plan.kv_heads},
                         {"complete", writer.safe_texts() >= writer.planned_texts()},
                         {"texts", writer.safe_texts()},
                         {"planned_texts", writer.planned_texts()},
                         {"skipped", skipped_json(texts)},
                         {"file_bytes", writer.bytes()},
                         {"this_run",
                          {{"texts", result.texts},
                           {"pairs", result.pairs},
                           {"tokens", result.tokens},
                           {"non_finite_scores", result.non_finite_scores},
                           {"seconds", seconds},
                           {"write_seconds", result.write_seconds},
                           {"total_seconds", seconds_since(work.start)}}}});
}

int collect_to_pairs(const Work& work) {
  const CollectOptions& options = work.options;
  const Communicator& comm = work.comm;
  const ModelSetup& setup = work.setup;
  PairsPlan plan = plan_of(options, setup);
  const PairTexts found = read_pair_texts(work, plan);
  comm.agree([&] {
    check_texts_fit(options, setup.config, " with its repetition", found.most_tokens,
                    bytes_of_pairs(options, setup.config, found.most_pairs), comm,
                    work.ranks_on_node);
  });

  std::vector<std::vector<int>> heads;
  heads.reserve(static_cast<std::size_t>(comm.size()));
  for (int rank = 0; rank < comm.size(); ++rank) heads.push_back(setup.partition.heads(0, rank));
  const SignalWatch watch;
  const auto writer = PairsWriter::open(options.output, plan, heads, comm);
  for (const std::string& note : writer->notes()) work.warn(note);
  work.say_texts(writer->planned_texts(), found.texts);

  Progress bar(work.talks(), options.progress);
  const ProgressCallback progress = [&](std::string_view what, std::int64_t done,
                                        std::int64_t total) {
    bar.update(what, done, total, what == "load" ? "" : "texts");
  };
  CollectResult result;
  const auto collecting = Clock::now();
  if (writer->texts() < writer->planned_texts()) {
    const auto model = load_model(setup, plan.dtype, options.random_weights,
                                  weight_storage_from_name(options.weights), comm, progress);
    result = collect_pairs(
        model, found.texts.texts, *writer, comm, [] { return caught_signal != 0; }, progress);
  }
  const double seconds = seconds_since(collecting);
  bar.clear();
  const auto signal = static_cast<int>(
      result.stopped ? comm.all_reduce_max(std::int64_t{caught_signal}) : std::int64_t{0});

  if (result.stopped) {
    work.warn(fmt::format("stopped by signal {}: {} has {} of {} texts; the same command continues",
                          signal, options.output, writer->safe_texts(), writer->planned_texts()));
  }
  if (result.non_finite_scores > 0) {
    work.warn(fmt::format("warning: {} scores are not finite; kvzap train leaves their pairs out",
                          result.non_finite_scores));
  }
  comm.agree_on_root([&] { tell_pairs(work, plan, found.texts, *writer, result, seconds); });
  return result.stopped ? 128 + signal : 0;
}

int collect_to_statistics(const Work& work) {
  const CollectOptions& options = work.options;
  const Communicator& comm = work.comm;
  const ModelConfig& config = work.setup.config;
  CollectTexts texts;
  std::int64_t count = 0, longest = 0;  // texts, and tokens of the longest one
  comm.agree_on_root([&] {
    check_writable(options.json);
    for (const auto& note :
         files::check_file_writable(options.query_statistics, statistics_option)) {
      work.warn(note);
    }
    texts = read_plain_texts(options.texts, options.rules, Tokenizer::load(options.model), config);
    count = static_cast<std::int64_t>(texts.texts.size());
    for (const CollectText& text : texts.texts) longest = std::max(longest, text.text_end);
  });
  parallel::broadcast(comm, 0, count, longest);
  comm.agree([&] {
    check_texts_fit(options, config, " and the statistics", longest,
                    bytes_of_moments(config, comm.size()), comm, work.ranks_on_node);
  });
  const SignalWatch watch;
  work.say_texts(count, texts);

  Progress bar(work.talks(), options.progress);
  const ProgressCallback progress = [&](std::string_view what, std::int64_t done,
                                        std::int64_t total) {
    bar.update(what, done, total, what == "load" ? "" : "texts");
  };
  const auto collecting = Clock::now();
  QueryMoments moments;
  {
    const auto model =
        load_model(work.setup, dtype_from_name(options.dtype), options.random_weights,
                   weight_storage_from_name(options.weights), comm, progress);
    moments = collect_query_moments(
        model, texts.texts, options.sink, comm, [] { return caught_signal != 0; }, progress);
  }
  const double seconds = seconds_since(collecting);
  bar.clear();
  const auto signal = static_cast<int>(
      moments.stopped ? comm.all_reduce_max(std::int64_t{caught_signal}) : std::int64_t{0});
  if (moments.stopped) {
    work.warn(fmt::format("stopped by signal {} after {} of {} texts: {} was not written", signal,
                          moments.texts, count, options.query_statistics));
  }
  comm.agree_on_root([&] {
    if (!moments.stopped) {
      write_query_moments(options.query_statistics, moments, config,
                          {{"kvzap", work.version},
                           {"model", options.model},
                           {"dtype", options.dtype},
                           {"texts_hash", texts.hash},
                           {"texts", std::to_string(moments.texts)},
                           {"queries", std::to_string(moments.queries)},
                           {"sink", std::to_string(options.sink)}});
      work.warn(fmt::format(
          "{} of {} in {:.1f} s ({:.0f} tokens/s); wrote {}",
          files::counted(moments.queries, "query"), files::counted(moments.texts, "text"), seconds,
          static_cast<double>(moments.tokens) / seconds, options.query_statistics));
    }
    if (options.json.empty()) return;
    write_report(options, {{"kvzap", work.version},
                           {"model", options.model},
                           {"texts_file", options.texts},
                           {"query_statistics", options.query_statistics},
                           {"ranks", comm.size()},
                           {"dtype", options.dtype},
                           {"layers", config.num_hidden_layers},
                           {"query_heads", config.num_attention_heads},
                           {"head_dim", config.head_dim},
                           {"sink", options.sink},
                           {"complete", !moments.stopped},
                           {"texts", moments.texts},
                           {"planned_texts", count},
                           {"skipped", skipped_json(texts)},
                           {"queries", moments.queries},
                           {"tokens", moments.tokens},
                           {"seconds", seconds},
                           {"total_seconds", seconds_since(work.start)}});
  });
  return moments.stopped ? 128 + signal : 0;
}

}  // namespace

void check_options(const CollectOptions& o) {
  require(!o.model.empty(), "no model: give a folder with -m");
  require(!o.texts.empty(), "no texts: give a JSONL file with -f");
  require_no_stdin(o.texts, "-f");
  const bool pairs = o.query_statistics.empty();
  require(
      !pairs || !o.output.empty(),
      "no output: give a file for pairs with -o, or one for statistics with --query-statistics");
  if (!pairs) {
    for (const char* option : {"--output", "--tokens-per-text", "--seed", "--compression"}) {
      require(!o.is_given(option),
              fmt::format("{} has no effect with --query-statistics, which writes no pairs and "
                          "uses all tokens of a text but the first --sink",
                          option));
    }
  }
  require(pairs || o.sink >= 0, fmt::format("--sink is {}; expected at least 0", o.sink));
  require(!pairs || !o.is_given("--sink"), "--sink has no effect without --query-statistics");
  const CollectRules& r = o.rules;
  require(r.tokens_per_text >= 1,
          fmt::format("--tokens-per-text is {}; expected at least 1", r.tokens_per_text));
  require(r.min_tokens >= 1, fmt::format("--min-tokens is {}; expected at least 1", r.min_tokens));
  require(r.max_tokens >= r.min_tokens,
          fmt::format("--max-tokens is {}; expected at least --min-tokens, {}", r.max_tokens,
                      r.min_tokens));
  require(r.per_subset >= 1, fmt::format("--per-subset is {}; expected at least 1", r.per_subset));
  require(r.max_texts >= 0,
          fmt::format("--max-texts is {}; expected at least 1, or 0 for all", r.max_texts));
  require(o.compression >= 0 && o.compression <= 9,
          fmt::format("--compression is {}; expected 0 to 9", o.compression));
  require(pairs || r.min_tokens > o.sink,
          fmt::format("--min-tokens is {}; expected more than --sink, {}: the first tokens do not "
                      "count",
                      r.min_tokens, o.sink));
  require(!pairs || has_pairs_files,
          "collect -o writes HDF5; this kvzap was built without it (KVZAP_ENABLE_HDF5=OFF)");
}

void declare(CLI::App& app, CollectOptions& o) {
  o.is_given = [&app](const std::string& option) { return app.get_option(option)->count() > 0; };
  const auto input = "Input";
  app.add_option(
         "-m,--model", o.model,
         "Hugging Face folder (config.json, *.safetensors, tokenizer.json, chat template) or "
         "GGUF file; required")
      ->type_name("MODEL")
      ->group(input);
  app.add_option("-f,--file", o.texts,
                 "JSONL file: one object per line, with a field text and, for balanced sampling, a "
                 "field subset; required")
      ->type_name("FILE")
      ->group(input);
  declare_dtype(app, o.dtype, "value type of weights, and of hidden states in the file", input);
  declare_weights(app, o.weights, input);
  declare_random_weights(app, o.random_weights,
                         "random weights from this seed: to try speed and memory", input);
  declare_rope(app, o.rope, input);
  declare_threads(app, o.threads, input);
  app.add_option("--layers", o.layers,
                 "use only this number of first layers, for trials; default: all")
      ->group(input);

  const auto sampling = "Sampling";
  app.add_option("--tokens-per-text", o.rules.tokens_per_text,
                 "tokens of each text to collect, drawn without replacement; shorter texts: all")
      ->capture_default_str()
      ->group(sampling);
  app.add_option("--min-tokens", o.rules.min_tokens, "leave out texts with fewer tokens")
      ->capture_default_str()
      ->group(sampling);
  app.add_option("--max-tokens", o.rules.max_tokens, "leave out texts with more tokens")
      ->capture_default_str()
      ->group(sampling);
  app.add_option("--per-subset", o.rules.per_subset,
                 "use only this number of first texts of each subset; texts without a subset: all")
      ->capture_default_str()
      ->group(sampling);
  app.add_option(
         "--max-texts", o.rules.max_texts,
         "use only this number of first texts; 0: all. May be reduced when the command continues")
      ->capture_default_str()
      ->group(sampling);
  app.add_option("--seed", o.rules.seed, "seed for the draw of tokens")
      ->capture_default_str()
      ->check(not_negative)
      ->group(sampling);

  const auto output = "Output";
  app.add_option("-o,--output", o.output,
                 "HDF5 file for the pairs; continues a file that the same command began; required, "
                 "or --query-statistics")
      ->type_name("FILE")
      ->group(output);
  app.add_option(
         "--query-statistics", o.query_statistics,
         "write mean and covariance of the queries to this safetensors file, instead of pairs, for "
         "run --policy expected-attention:statistics=FILE; runs each text once, without a "
         "conversation; a stopped run writes no file")
      ->type_name("FILE")
      ->group(output);
  app.add_option("--sink", o.sink,
                 "with --query-statistics: leave out the queries of this number of first tokens of "
                 "each text")
      ->capture_default_str()
      ->group(output);
  app.add_option("--compression", o.compression, "deflate level, 0 (none) to 9")
      ->capture_default_str()
      ->group(output);
  app.add_option("--json", o.json, "write a report to this file; - is standard output")
      ->type_name("FILE")
      ->group(output);
  declare_progress(app, o.progress, output);
  app.add_flag("-q,--quiet", o.quiet, "print errors only")->group(output);
  declare_deck(app, o.config, output);
}

int collect(const CollectOptions& options, const Communicator& comm, const std::string& version) {
  const auto start = Clock::now();
  std::optional<ModelSetup> setup;
  agree_on_usage(comm, [&] {
    setup = set_up_model(options.model, options.layers, "", comm.size(), options.rope);
  });
  const Work work{options, comm, version, *setup, comm.ranks_on_node(), start};
  if (comm.is_root()) print_notes(*setup, work.talks());
  use_threads(options.threads, comm, work.talks());
  return options.query_statistics.empty() ? collect_to_pairs(work) : collect_to_statistics(work);
}

}  // namespace kvzap::driver
