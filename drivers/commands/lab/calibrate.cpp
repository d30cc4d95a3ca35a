#include "commands/lab/calibrate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <kvzap/lab/calibrate_thresholds.hpp>
#include <kvzap/model/memory_plan.hpp>
#include <kvzap/model/model.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <nlohmann/json.hpp>

#include "base/stopwatch.hpp"
#include "commands/run/prompt.hpp"
#include "commands/support/model_loading.hpp"
#include "commands/support/recommendation.hpp"
#include "commands/support/setup.hpp"
#include "console/console.hpp"
#include "console/progress.hpp"
#include "files/counted.hpp"
#include "files/json_file.hpp"
#include "files/temporary_file.hpp"
#include "options/bench_options.hpp"
#include "options/one_file.hpp"
#include "options/options.hpp"
#include "options/strict_values.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using base::Clock;
using base::seconds_since;
using Texts = std::vector<std::vector<TokenId>>;

constexpr const char* usual_ratios = "0.5,0.66,0.75";
constexpr const char* usual_window = "128";

/// Returns the requested evict ratios, ascending and without duplicates.
std::vector<double> asked_ratios(const CalibrateOptions& o) {
  std::vector<double> ratios =
      real_numbers(o.evict_ratios, "--evict-ratio", usual_ratios, "a number above 0 and below 1",
                   [](double r) { return r > 0 && r < 1; });
  std::sort(ratios.begin(), ratios.end());
  ratios.erase(std::unique(ratios.begin(), ratios.end()), ratios.end());
  return ratios;
}

/// Returns the requested windows, descending and without duplicates.
std::vector<int> asked_windows(const CalibrateOptions& o) {
  const auto given = whole_numbers(o.windows, "--window", usual_window, 1, 1 << 24);
  std::vector<int> windows(given.begin(), given.end());
  std::sort(windows.begin(), windows.end(), std::greater<>());
  windows.erase(std::unique(windows.begin(), windows.end()), windows.end());
  return windows;
}

/// Returns the file that receives the table; empty if the table is not stored.
fs::path table_file(const CalibrateOptions& o) {
  if (!o.store) return {};
  return o.output.empty() ? ThresholdTable::file_in(o.surrogate) : fs::path(o.output);
}

/// Throws Error if an output would replace another output or the texts.
void check_outputs_differ(const CalibrateOptions& o) {
  const std::string table = table_file(o).string();
  const auto both_name = [](const std::string& a, const std::string& b) {
    return !a.empty() && !b.empty() && name_one_file(a, b);
  };
  const char* const store = o.output.empty() ? "the thresholds" : "-o";
  require(!both_name(o.json, table),
          fmt::format("--json and {} both name the file {}", store, o.json));
  require(!both_name(o.json, o.file) || o.json == "-",
          fmt::format("--json and -f both name the file {}", o.file));
  require(!both_name(table, o.file), fmt::format("{} and -f both name the file {}", store, o.file));
}

/// Returns whether the command only adds a recommendation to a table that exists.
bool recommends_alone(const CalibrateOptions& o) {
  return o.file.empty() && !o.evaluations.empty();
}

/// Checks that the table can be stored, before minutes of work. Returns the unfinished files that
/// it removed.
std::vector<std::string> check_storable(const fs::path& file) {
  if (file.empty()) return {};
  try {
    return files::check_file_writable(file, "thresholds");
  } catch (const Error& error) {
    throw Error(fmt::format("{}; -o FILE stores them elsewhere, --no-store nowhere", error.what()));
  }
}

/// Reads the texts as contexts of `kvzap run`, only texts of at most `limit` tokens (0: no limit).
Texts load_texts(const CalibrateOptions& o, const ModelConfig& config, std::int64_t limit,
                 bool talks, const Communicator& comm) {
  std::optional<Tokenizer> tokenizer;
  session::PromptForm form;
  comm.agree_on_root([&] {
    tokenizer = Tokenizer::load(o.model);
    form = prompt_form(o.model, o.raw);
  });
  const TextEncoder encode = [&](const std::string& text) {
    return form.context(*tokenizer, text);
  };
  Texts texts = read_texts(o.file, encode, config, comm, o.max_texts.value_or(0));
  if (limit == 0) return texts;
  const std::size_t all = texts.size();
  texts.erase(std::remove_if(
                  texts.begin(), texts.end(),
                  [&](const auto& text) { return static_cast<std::int64_t>(text.size()) > limit; }),
              texts.end());
  const std::size_t too_long = all - texts.size();
  if (texts.empty()) {
    throw AgreedError(fmt::format(
        "{}: all {} texts have more than {} tokens, the longest accepted (-c, or the model's "
        "{} = {})",
        o.file, all, limit, name_of_longest(config), config.longest_context()));
  }
  if (too_long > 0 && talks) {
    say("kvzap: warning: {}: {} of {} texts have more than {} tokens: left out\n", o.file, too_long,
        all, limit);
  }
  return texts;
}

ScoredTexts score(const CalibrateOptions& o, const ModelSetup& setup,
                  const std::shared_ptr<Scorer>& scorer, const Texts& texts,
                  const Communicator& comm, const ProgressCallback& progress) {
  std::shared_ptr<const Model> model;
  comm.agree([&] {
    model = std::make_shared<const Model>(
        Model::load(o.model, setup.config, dtype_from_name(o.dtype), setup.partition, comm.rank(),
                    {o.random_weights, weight_storage_from_name(o.weights), progress}));
  });
  return score_texts(model, scorer, texts, {asked_windows(o), o.sink}, comm, progress);
}

/// Finds a threshold for each ratio. Leaves out, with a note, the ratios that no threshold reaches
/// on these texts. Throws AgreedError if there are only such ratios. Collective.
ThresholdTable::Window find_thresholds(int window, const EvictRatioCurves& curves,
                                       const std::vector<double>& ratios, bool talks) {
  ThresholdTable::Window table{window, {}};
  const double largest = curves.largest();
  for (const double ratio : ratios) {
    if (ratio > largest && !table.rows.empty()) {
      if (talks) {
        say("kvzap: warning: no threshold for an evict ratio of {}: windows of {} and sinks stay, "
            "so at most {:.4f} of these texts can be evicted; longer texts or a smaller --window "
            "allow more\n",
            ratio, window, largest);
      }
      continue;
    }
    table.rows.push_back(curves.row(ratio));
    const double mean = table.rows.back().mean;
    constexpr double coarse = 0.01;
    if (talks && std::abs(mean - ratio) > coarse) {
      say("kvzap: warning: an evict ratio of {} is met by no threshold: {:.3f} is the "
          "nearest, since many scores are alike\n",
          ratio, mean);
    }
  }
  return table;
}

/// What a row of the table does to the texts.
struct RowEffect {
  std::vector<double> evict_ratios;                  // (text)
  std::vector<std::vector<std::int64_t>> kept_rows;  // [layer][KV head], of all texts
};

/// Makes the report. `effects`: of each row of the table, window by window.
nlohmann::ordered_json to_json(const CalibrateOptions& o, const ThresholdTable& table,
                               const std::vector<RowEffect>& effects, const Texts& texts,
                               const std::string& version) {
  nlohmann::ordered_json json = {{"format", "kvzap.calibration"},
                                 {"format_version", 1},
                                 {"version", version},
                                 {"model", o.model},
                                 {"surrogate", o.surrogate},
                                 {"dtype", o.dtype},
                                 {"chat_template", !o.raw},
                                 {"windows", asked_windows(o)},
                                 {"sink", o.sink},
                                 {"stored", table_file(o).string()},
                                 {"tokens", table.tokens},
                                 {"rows", nlohmann::ordered_json::array()},
                                 {"texts", nlohmann::ordered_json::array()}};
  for (const ThresholdTable::Window& window : table.windows) {
    for (const ThresholdTable::Row& row : window.rows) {
      json["rows"].push_back({{"window", window.window},
                              {"evict_ratio", row.evict_ratio},
                              {"threshold", row.threshold},
                              {"mean", row.mean},
                              {"deviation", row.deviation},
                              {"least", row.least},
                              {"most", row.most},
                              {"kept_rows", effects[json["rows"].size()].kept_rows}});
    }
  }
  for (std::size_t i = 0; i < texts.size(); ++i) {
    std::vector<double> ratios;
    ratios.reserve(effects.size());
    for (const auto& row : effects) ratios.push_back(row.evict_ratios[i]);
    json["texts"].push_back({{"tokens", texts[i].size()}, {"evict_ratios", ratios}});
  }
  return json;
}

/// Adds a recommendation to the table in the surrogate's folder.
void add_recommendation(const CalibrateOptions& o, bool talks) {
  ThresholdTable table = ThresholdTable::load(ThresholdTable::file_in(o.surrogate));
  table.recommended = recommend_threshold(o.evaluations, o.surrogate);
  const std::string text = table.text();
  std::fwrite(text.data(), 1, text.size(), stdout);
  flush_stdout();
  const fs::path file = table_file(o);
  if (file.empty()) return;
  table.write(file);
  if (talks) say("stored in {}\n", file.string());
}

}  // namespace

void check_options(const CalibrateOptions& o) {
  require(!o.surrogate.empty(), "no surrogate: give its folder with --surrogate");
  require(o.store || o.output.empty(), "-o and --no-store: give one of them");
  require(o.output != "-", "-o cannot be standard output; --json - is");
  require(o.output.empty() || !fs::is_directory(o.output),
          fmt::format("-o {}: is a folder; expected a file", o.output));
  if (recommends_alone(o)) {
    for (const char* option :
         {"--evict-ratio", "--window", "--sink", "--max-texts", "--ctx-size", "--raw", "--json"}) {
      require(!o.is_given(option), fmt::format("{} has no effect without texts (-f)", option));
    }
    return;
  }
  require(!o.model.empty(), "no model: give a Hugging Face folder or a GGUF file with -m");
  require(!o.file.empty(),
          "no texts: give a file of them with -f FILE, or an evaluation with --evaluation");
  require_no_stdin(o.file, "-f");
  asked_ratios(o);
  asked_windows(o);
  require(o.sink >= 0, fmt::format("--sink is {}; expected 0 or more", o.sink));
  require(!o.max_texts || *o.max_texts >= 1,
          fmt::format("--max-texts is {}; expected at least 1", o.max_texts.value_or(0)));
  require(!o.max_context || *o.max_context >= 1,
          fmt::format("-c is {}; expected at least 1", o.max_context.value_or(0)));
  check_outputs_differ(o);
}

void declare(CLI::App& app, CalibrateOptions& o) {
  o.is_given = [&app](const std::string& option) { return app.get_option(option)->count() > 0; };
  const auto model = "Model";
  app.add_option("-m,--model", o.model, "Hugging Face folder or GGUF file; required")
      ->type_name("MODEL")
      ->group(model);
  app.add_option("--surrogate", o.surrogate, "KVzap surrogate folder; required")
      ->type_name("DIR")
      ->group(model);
  declare_dtype(app, o.dtype, "value type of weights and cache", model);
  declare_weights(app, o.weights, model);
  declare_random_weights(
      app, o.random_weights,
      "random weights from this seed; the folder then needs only config.json and a tokenizer",
      model);
  declare_rope(app, o.rope, model);
  declare_threads(app, o.threads, model);

  const auto texts = "Texts";
  app.add_option(
         "-f,--file", o.file,
         "file of texts, each used as a context of kvzap run: one per line, or one JSON object "
         "per line with a field \"text\"; required")
      ->type_name("FILE")
      ->group(texts);
  app.add_option("--max-texts", o.max_texts, "use only this number of first texts; default: all")
      ->group(texts);
  app.add_flag("--raw", o.raw, "no chat template; BOS only if the tokenizer adds one")
      ->group(texts);
  app.add_option("-c,--ctx-size", o.max_context,
                 "leave out texts with more tokens; default: the model's longest context, with "
                 "RoPE scaling "
                 "(no limit with --random-weights)")
      ->group(texts);

  const auto thresholds = "Thresholds";
  add_texts(
      app, "--evict-ratio", o.evict_ratios,
      "find a threshold for each of these evict ratios of the context, as means over the texts; "
      "above 0 and below 1, between commas")
      ->type_name("LIST")
      ->default_str(usual_ratios)
      ->group(thresholds);
  add_texts(app, "--window", o.windows,
            "always keep this number of most recent tokens, as the later run; at least 1. Several "
            "of them, between commas, each get thresholds of their own")
      ->type_name("LIST")
      ->default_str(usual_window)
      ->group(thresholds);
  add_texts(app, "--evaluation", o.evaluations,
            "folder of kvzap eval with the policies none and kvzap at several --thresholds: "
            "store the threshold and window that evict most while the interval of the accuracy "
            "contains the full cache's accuracy, for --threshold auto and --window auto. May be "
            "repeated, for evaluations with other windows. Without -f, the command adds them to "
            "the stored thresholds and needs no model")
      ->type_name("DIR")
      ->group(thresholds);
  app.add_option("--sink", o.sink, "always keep this number of first positions, as the later run")
      ->capture_default_str()
      ->group(thresholds);

  const auto output = "Output";
  app.add_option("-o,--output", o.output,
                 "store the thresholds in this file; default: thresholds.json in the surrogate's "
                 "folder, which kvzap run --evict-ratio reads")
      ->type_name("FILE")
      ->group(output);
  app.add_flag("--store,!--no-store", o.store,
               "store the thresholds, or only print them (default: store)")
      ->group(output);
  app.add_option("--json", o.json,
                 "write a report with the evict ratios of every text to this file; - is standard "
                 "output")
      ->type_name("FILE")
      ->group(output);
  declare_progress(app, o.progress, output);
  app.add_flag("-q,--quiet", o.quiet, "no progress on standard error")->group(output);
  declare_deck(app, o.config, output);
}

namespace {

/// Throws Error if a rank has no memory for the longest text. Collective.
void check_memory_for(const Texts& texts, const CalibrateOptions& options,
                      const ModelConfig& config, const Communicator& comm) {
  const int ranks_on_node = comm.ranks_on_node();
  comm.agree([&] {
    std::size_t most = 0;
    for (const auto& text : texts) most = std::max(most, text.size());
    const MemoryPlan plan =
        plan_memory(config, {dtype_from_name(options.dtype), static_cast<std::int64_t>(most), 0,
                             comm.size(), 1, 0, quantised_bytes(options, config, comm.size())});
    std::int64_t bytes = 0;
    for (const auto& rank : plan.ranks) {
      bytes = std::max(bytes, rank.weights + rank.activations + rank.attention + rank.dense_layer);
    }
    check_memory(
        bytes, ranks_on_node,
        fmt::format("weights and the longest of the texts, {}", files::counted(most, "token")));
  });
}

}  // namespace

void calibrate(const CalibrateOptions& options, const Communicator& comm,
               const std::string& version) {
  const bool talks = comm.is_root() && !options.quiet;
  if (recommends_alone(options)) {
    return comm.agree_on_root([&] { add_recommendation(options, talks); });
  }

  // 1. Check all inputs before the work starts.
  std::optional<ModelSetup> setup;
  std::int64_t limit = 0;
  agree_on_usage(comm, [&] {
    setup = set_up_model(options.model, std::nullopt, "", comm.size(), options.rope);
    limit =
        options.max_context.value_or(options.random_weights ? 0 : setup->config.longest_context());
  });
  const ModelConfig& config = setup->config;
  if (comm.is_root()) print_notes(*setup, talks);
  std::optional<ThresholdTable::Recommendation> recommended;
  comm.agree_on_root([&] {
    if (!options.evaluations.empty()) {
      recommended = recommend_threshold(options.evaluations, options.surrogate);
    }
    check_writable(options.json);
    for (const auto& note : check_storable(table_file(options))) {
      if (talks) say("kvzap: warning: {}\n", note);
    }
  });
  std::shared_ptr<Surrogate> surrogate;
  comm.agree([&] {
    surrogate = load_surrogate(options.surrogate, *setup, dtype_from_name(options.dtype), comm);
  });
  const Texts texts = load_texts(options, config, limit, talks, comm);
  use_threads(options.threads, comm, talks);
  check_memory_for(texts, options, config, comm);

  // 2. Score the texts.
  const auto start = Clock::now();
  Progress bar(talks, options.progress);
  const ProgressCallback progress = [&](std::string_view what, std::int64_t done,
                                        std::int64_t total) {
    bar.update(what, done, total, what == "load" ? "" : "tokens");
  };
  const ScoredTexts scored = score(options, *setup, surrogate, texts, comm, progress);
  bar.clear();

  // 3. Find the thresholds.
  ThresholdTable table;
  table.model = options.model;
  table.dtype = dtype_from_name(options.dtype);
  table.chat_template = !options.raw;
  table.texts = scored.curves.front().texts();
  table.tokens = scored.curves.front().tokens();
  table.sink = options.sink;
  table.recommended = recommended;
  std::vector<RowEffect> effects;
  const std::vector<int> windows = asked_windows(options);
  for (std::size_t w = 0; w < windows.size(); ++w) {
    const EvictRatioCurves& curves = scored.curves[w];
    table.windows.push_back(find_thresholds(windows[w], curves, asked_ratios(options), talks));
    for (const auto& row : table.windows.back().rows) {
      const auto threshold = static_cast<float>(row.threshold);
      effects.push_back(
          {curves.evict_ratios(threshold), curves.kept_rows(setup->partition, threshold)});
    }
  }

  // 4. Report and store.
  comm.agree_on_root([&] {
    if (talks && scored.non_finite_scores > 0) {
      say("kvzap: warning: {} with a score that is NaN or infinite; no threshold evicts these\n",
          files::counted(scored.non_finite_scores, "pair"));
    }
    const std::string text = options.json != "-" ? table.text() : "";
    std::fwrite(text.data(), 1, text.size(), stdout);
    const fs::path file = table_file(options);
    if (!file.empty()) table.write(file);
    if (!options.json.empty()) {
      write_whole(options.json,
                  files::json_lines(to_json(options, table, effects, texts, version)));
    }
    flush_stdout();
    if (talks) {
      say("{} of {} in {:.1f} s; {}\n", files::counted(table.texts, "text"),
          files::counted(table.tokens, "token"), seconds_since(start),
          file.empty() ? "not stored" : "stored in " + file.string());
    }
  });
}

}  // namespace kvzap::driver
