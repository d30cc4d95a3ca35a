#include "options/bench_options.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "files/decimal.hpp"
#include "files/nearest.hpp"
#include "options/options.hpp"
#include "options/policy_options.hpp"
#include "options/strict_values.hpp"

namespace kvzap::driver {
namespace {

/// Enough for any context; the product of two such numbers does not overflow.
constexpr std::int64_t most_tokens = 1'000'000'000;
constexpr std::int64_t most_sequences = 65536;

[[noreturn]] void fail_entry(const char* flag, const std::string& entry,
                             const std::string& expected) {
  throw Error(
      fmt::format("{} has the entry '{}'; expected {}, or several of them separated by commas",
                  flag, entry, expected));
}

/// Returns the entries of a list that was given in one or several parts, or `usual` if it was not
/// given.
std::vector<std::string> listed_in(const std::vector<std::string>& parts, const char* flag,
                                   const char* usual) {
  const std::vector<std::string> standard = {usual};
  std::vector<std::string> entries;
  for (const std::string& part : parts.empty() ? standard : parts) {
    if (part.empty()) throw Error(fmt::format("{}: the list is empty", flag));
    for (std::size_t begin = 0; begin <= part.size();) {
      const std::size_t end = std::min(part.find(',', begin), part.size());
      const std::size_t first = std::min(part.find_first_not_of(' ', begin), end);
      const std::size_t last = part.find_last_not_of(' ', end - 1) + 1;
      entries.push_back(first < end ? part.substr(first, last - first) : "");
      begin = end + 1;
    }
  }
  return entries;
}

}  // namespace

std::vector<double> real_numbers(const std::vector<std::string>& parts, const char* flag,
                                 const char* usual, const char* expected,
                                 const std::function<bool(double)>& is_good) {
  std::vector<double> numbers;
  for (const std::string& entry : listed_in(parts, flag, usual)) {
    double number = 0;
    if (files::read_real(entry, number) != files::DecimalFault::none || !std::isfinite(number) ||
        !is_good(number)) {
      fail_entry(flag, entry, expected);
    }
    numbers.push_back(number);
  }
  return numbers;
}

std::vector<std::int64_t> whole_numbers(const std::vector<std::string>& parts, const char* flag,
                                        const char* usual, std::int64_t least, std::int64_t most) {
  std::vector<std::int64_t> numbers;
  for (const std::string& entry : listed_in(parts, flag, usual)) {
    std::int64_t number = 0;
    if (files::read_whole(entry, number) != files::DecimalFault::none || number < least ||
        number > most) {
      fail_entry(flag, entry, fmt::format("a whole number from {} to {}", least, most));
    }
    numbers.push_back(number);
  }
  return numbers;
}

std::string BenchTest::name() const {
  return fmt::format("{}{}", kind == Kind::prefill ? "pp" : "tg", tokens);
}

namespace {

void declare_model_and_tests(CLI::App& app, BenchOptions& o) {
  // Each flag takes one part, so that the next argument is not taken as another part. A flag may be
  // repeated.
  const auto add_list = [&](const std::string& name, std::vector<std::string>& parts,
                            const char* usual, const std::string& description) {
    return add_texts(app, name, parts, description)->type_name("LIST")->default_str(usual);
  };

  const auto model = "Model";
  app.add_option("-m,--model", o.model,
                 "Hugging Face folder or GGUF file; without *.safetensors in a folder, weights are "
                 "random. Required")
      ->type_name("MODEL")
      ->group(model);
  declare_dtype(app, o.dtype, "value type of weights and cache", model);
  declare_kv_type(app, o.kv_type, model);
  declare_read_pages(app, o.read_pages, model);
  app.add_option("--layers", o.layers, "use only the first INT layers; default: all")->group(model);
  declare_weights(app, o.weights, model);
  declare_random_weights(app, o.random_weights,
                         "generate random weights from this seed, even if the folder has weights; "
                         "default: 0 if it has none",
                         model);
  declare_rope(app, o.rope, model);
  declare_threads(app, o.threads, model);
  app.add_option("--surrogate", o.surrogate,
                 "KVzap surrogate folder: its scores replace random ones, and a prefill fills the "
                 "cache before a test instead of random rows")
      ->type_name("DIR")
      ->group(model);

  const auto tests = "Tests (LIST: numbers separated by commas; every combination is a test)";
  add_list("-p,--n-prompt", o.prompt_tokens, "512",
           "prefill of this many random tokens, tests pp512 etc.; 0: no such test")
      ->group(tests);
  add_list("-n,--n-gen", o.new_tokens, "128",
           "decode of this many tokens, one at a time, tests tg128 etc.; 0: no such test")
      ->group(tests);
  add_list("-d,--n-depth", o.depths, "0", "tokens that the context has before the test")
      ->group(tests);
  add_list("-b,--batch", o.batches, "1", "sequences that decode together")->group(tests);
  add_list("--evict-ratio", o.evict_ratios, "0",
           "share of all pairs that random scores evict, in [0, 1)")
      ->group(tests);
  add_list("--skew", o.skews, "1",
           "ratio of the longest to the shortest KV head of a layer after eviction, at least 1; "
           "without eviction, only one value is tested")
      ->group(tests);
}

void declare_pruning_and_output(CLI::App& app, BenchOptions& o) {
  const auto pruning = "Pruning";
  app.add_option("--threshold", o.threshold,
                 "evict pairs with a log score below this; required with --surrogate")
      ->group(pruning);
  app.add_option("--prune", o.prune,
                 "tokens to judge: prefill (prompts, and rows in the cache before the test) or "
                 "always (also generated tokens)")
      ->capture_default_str()
      ->check(CLI::IsMember({"prefill", "always"}))
      ->group(pruning);
  declare_window(app, o.window, o.auto_window,
                 "most recent tokens that always stay; at least 1. auto: the window that kvzap "
                 "calibrate has recommended in the surrogate's folder",
                 pruning);
  app.add_option("--prefill", o.prefill,
                 "dense: run a prompt with the full cache, then prune; sparse: run and prune chunk "
                 "by chunk; default: sparse if pairs are evicted, else dense")
      ->check(CLI::IsMember({"dense", "sparse"}))
      ->group(pruning);
  app.add_option("--chunk", o.chunk, "tokens of a chunk in sparse prefill; at least 1")
      ->capture_default_str()
      ->group(pruning);
  declare_page_rows(app, o.page_rows, pruning);
  declare_balance(app, o.balance, pruning);

  const auto measurement = "Measurement";
  app.add_option("-r,--repetitions", o.repetitions,
                 "timed repetitions of each test, all from the same cache; at least 1")
      ->capture_default_str()
      ->group(measurement);
  app.add_flag("--warmup,!--no-warmup", o.warmup,
               "run each test once untimed first, or not (default: run it)")
      ->group(measurement);
  app.add_option("--seed", o.seed, "seed of tokens, scores and contents of the cache")
      ->capture_default_str()
      ->check(not_negative)
      ->group(measurement);

  const auto output = "Output";
  app.add_option("-o,--output", o.output,
                 "format of the results on standard output: a Markdown table, CSV or JSON")
      ->capture_default_str()
      ->check(CLI::IsMember({"md", "csv", "json"}))
      ->group(output);
  add_texts(app, "--columns", o.columns,
            fmt::format("columns of the Markdown table, in this order: some of {}, separated by "
                        "commas, or all; default: the columns that differ or matter most in these "
                        "tests, up to 120 characters (CSV and JSON have all)",
                        fmt::join(bench_column_names(), ", ")))
      ->type_name("LIST")
      ->group(output);
  declare_progress(app, o.progress, output);
  app.add_flag("-q,--quiet", o.quiet, "print no notes and no progress on standard error")
      ->group(output);
  app.add_option("--config", o.config,
                 "TOML deck with any of these options, by their long names, lists as lists or as "
                 "texts; flags override it")
      ->type_name("DECK")
      ->group(output);
}

}  // namespace

void declare(CLI::App& app, BenchOptions& options) {
  declare_model_and_tests(app, options);
  declare_pruning_and_output(app, options);
}

const std::vector<std::string>& bench_column_names() {
  static const std::vector<std::string> names = {
      "model",    "size",    "params",       "backend",     "simd",  "ranks",      "dtype",
      "test",     "depth",   "batch",        "evict-ratio", "skew",  "evicted",    "t/s",
      "ms/token", "kv-live", "kv-allocated", "peak-rss",    "calls", "call-bytes", "call-ms"};
  return names;
}

std::vector<std::string> columns_of(const BenchOptions& o) {
  if (o.columns.empty()) return {};
  require(o.output == "md",
          fmt::format("--columns is for the Markdown table; -o {} has all of them", o.output));
  const auto& known = bench_column_names();
  std::vector<std::string> entries = listed_in(o.columns, "--columns", "");
  if (entries == std::vector<std::string>{"all"}) return known;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto begin = entries.begin();
    const std::string& name = entries[i];
    require(std::find(begin, begin + static_cast<std::ptrdiff_t>(i), name) ==
                begin + static_cast<std::ptrdiff_t>(i),
            fmt::format("--columns names {} twice", name));
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    const std::string nearest = files::nearest_name(name, known);
    throw Error(fmt::format("--columns: there is no column '{}'{}; expected all, or some of {}",
                            name, nearest.empty() ? "" : " (did you mean " + nearest + "?)",
                            fmt::join(known, ", ")));
  }
  return entries;
}

Pruning pruning_of(const BenchOptions& o) {
  Pruning pruning = Pruning::kvzap(o.surrogate);
  pruning.amount.threshold = o.threshold;
  pruning.window = o.window;
  pruning.auto_window = o.auto_window;
  if (pruning.has_policy() && o.prune == name_of(PruneMode::always)) {
    pruning.mode = PruneMode::always;
  }
  pruning.chunk = o.chunk;
  return pruning;
}

std::vector<BenchTest> tests_of(const BenchOptions& o) {
  columns_of(o);  // throws for unknown columns
  require(!o.model.empty(), "no model: give a Hugging Face folder or a GGUF file with -m");
  check_page_rows(o.page_rows);
  check_balance(o.balance);
  page_format(o.kv_type, o.dtype);
  read_pages(o.read_pages);
  require(o.repetitions >= 1 && o.repetitions <= 1'000'000,
          fmt::format("-r is {}; expected 1 to 1000000", o.repetitions));
  const bool has_surrogate = !o.surrogate.empty();
  require(has_surrogate == o.threshold.has_value(),
          has_surrogate
              ? "--surrogate needs --threshold, the log score below which a pair is evicted"
              : "--threshold has no effect without --surrogate: --evict-ratio sets the share that "
                "random scores evict");
  check(pruning_of(o), {}, flag_names());
  require(!has_surrogate || o.evict_ratios.empty(),
          "--evict-ratio and --surrogate: with a surrogate, --threshold decides which pairs are "
          "evicted");
  require(!has_surrogate || o.skews.empty(),
          "--skew and --surrogate: the surrogate decides which heads keep more");

  const auto prompts = whole_numbers(o.prompt_tokens, "-p", "512", 0, most_tokens);
  const auto generated = whole_numbers(o.new_tokens, "-n", "128", 0, most_tokens);
  const auto depths = whole_numbers(o.depths, "-d", "0", 0, most_tokens);
  const auto batches = whole_numbers(o.batches, "-b", "1", 1, most_sequences);
  const auto ratios =
      real_numbers(o.evict_ratios, "--evict-ratio", "0", "a number of at least 0 and less than 1",
                   [](double ratio) { return ratio >= 0 && ratio < 1; });
  const auto skews = real_numbers(o.skews, "--skew", "1", "a number of at least 1",
                                  [](double skew) { return skew >= 1; });

  std::vector<BenchTest> tests;
  for (const double ratio : ratios) {
    // If all heads keep everything, other values of skew would repeat the test.
    for (const double skew : ratio == 0 ? std::vector<double>{1} : skews) {
      BenchTest test;
      if (!has_surrogate) test.evict_ratio = ratio;
      test.skew = skew;
      test.is_sparse = o.prefill.empty() ? test.is_pruned() : o.prefill == "sparse";
      for (const std::int64_t depth : depths) {
        test.depth = depth;
        test.kind = BenchTest::Kind::prefill;
        test.batch = 1;
        for (const std::int64_t tokens : prompts) {
          if (tokens == 0) continue;
          test.tokens = tokens;
          test.step_tokens = test.is_sparse ? std::min(tokens, o.chunk) : tokens;
          tests.push_back(test);
        }
        test.kind = BenchTest::Kind::decode;
        test.step_tokens = 1;
        for (const std::int64_t batch : batches) {
          test.batch = static_cast<int>(batch);
          for (const std::int64_t tokens : generated) {
            if (tokens == 0) continue;
            test.tokens = tokens;
            tests.push_back(test);
          }
        }
      }
    }
  }
  require(!tests.empty(), "nothing to test: -p and -n are both 0");
  return tests;
}

}  // namespace kvzap::driver
