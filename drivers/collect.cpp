#include "collect.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <kvzap/chat_template.hpp>
#include <kvzap/collect.hpp>
#include <kvzap/memory_plan.hpp>
#include <kvzap/pairs.hpp>
#include <kvzap/tokenizer.hpp>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/fnv.hpp"
#include "linalg/host/blas_threads.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "setup.hpp"
#include "signals.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void validate(const CollectOptions& o) {
  require(!o.model.empty(), "no model: give a folder with -m");
  require(!o.texts.empty(), "no texts: give a JSONL file with -f");
  require(!o.output.empty(), "no output: give a file with -o");
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
  require(has_pairs_files,
          "collect writes HDF5; this kvzap was built without it (KVZAP_ENABLE_HDF5=OFF)");
}

/// Tells models apart: the text files that decide on what a model computes, and of each file of
/// weights its name, its size, and its beginning and end. (Reading all of it would take longer than
/// loading this rank's share.)
std::string hash_of_model(const fs::path& folder, bool with_weights) {
  std::uint64_t hash = detail::fnv_start;
  const auto add_part = [&](const fs::path& file, std::uintmax_t begin, std::size_t bytes) {
    std::ifstream stream(file, std::ios::binary);
    stream.seekg(static_cast<std::streamoff>(begin));
    std::string part(bytes, '\0');
    stream.read(part.data(), static_cast<std::streamsize>(bytes));
    hash = detail::fnv1a(part, hash);
  };
  std::vector<fs::path> files;
  for (const char* name :
       {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}) {
    files.emplace_back(folder / name);
  }
  if (with_weights) {
    std::vector<fs::path> weights;
    for (const auto& entry : fs::directory_iterator(folder)) {
      if (entry.path().extension() == ".safetensors") weights.push_back(entry.path());
    }
    std::sort(weights.begin(), weights.end());
    files.insert(files.end(), weights.begin(), weights.end());
  }
  for (const fs::path& file : files) {
    std::error_code ignored;
    if (!fs::is_regular_file(file, ignored)) continue;
    const std::uintmax_t size = fs::file_size(file);
    constexpr std::uintmax_t most = std::uintmax_t{1} << 20;
    hash = detail::fnv1a(fmt::format("{} {}", file.filename().string(), size), hash);
    add_part(file, 0, static_cast<std::size_t>(std::min(size, most)));
    if (size > most) add_part(file, size - most, static_cast<std::size_t>(most));
  }
  return fmt::format("{:016x}", hash);
}

PairsPlan plan_of(const CollectOptions& options, const ModelSetup& setup) {
  PairsPlan plan;
  plan.model = options.model;
  plan.dtype = dtype_from_name(options.dtype);
  plan.hidden_size = setup.config.hidden_size;
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
  return plan;
}

/// What prefill of the longest text takes beside the weights, and its pairs on their way to the
/// file.
void check_texts_fit(const CollectOptions& options, const ModelConfig& config, std::int64_t longest,
                     std::int64_t most_pairs, const Communicator& comm, int ranks_on_node) {
  const MemoryPlan planned =
      plan_memory(config, dtype_from_name(options.dtype), longest, 0, comm.size(), 1, 0);
  std::int64_t most = 0;
  for (const auto& rank : planned.ranks) {
    most = std::max(most, rank.weights + rank.activations + rank.attention + rank.dense_layer);
  }
  const auto value = static_cast<std::int64_t>(size_of(dtype_from_name(options.dtype)));
  // Once as the watcher takes them, once as they wait for a whole chunk.
  most += 2 * config.num_hidden_layers * most_pairs * config.hidden_size * value;
  check_memory(most, ranks_on_node,
               fmt::format("weights and the longest text with its repetition, {} tokens", longest));
}

template <class Value>
CollectResult run_texts(const CollectOptions& options, const ModelSetup& setup,
                        const CollectTexts& texts, PairsWriter& writer, const Communicator& comm,
                        const ProgressCallback& progress) {
  std::shared_ptr<const Model<Value>> model;
  comm.agree([&] {
    model = std::make_shared<const Model<Value>>(
        Model<Value>::load(options.model, setup.config, setup.partition, comm.rank(),
                           options.random_weights, progress));
  });
  return collect_pairs<Value>(
      model, texts.texts, writer, comm, [] { return caught_signal != 0; }, progress);
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

}  // namespace

void declare(CLI::App& app, CollectOptions& o) {
  const auto input = "Input";
  app.add_option("-m,--model", o.model,
                 "Hugging Face folder: config.json, *.safetensors, tokenizer.json, chat template; "
                 "required")
      ->type_name("DIR")
      ->group(input);
  app.add_option("-f,--file", o.texts,
                 "JSONL file: an object per line with a field text and, for balanced sampling, a "
                 "field subset; required")
      ->type_name("FILE")
      ->group(input);
  app.add_option("--dtype", o.dtype, "value type of weights, and of hidden states in the file")
      ->capture_default_str()
      ->check(CLI::IsMember({"f32", "bf16", "f16"}))
      ->group(input);
  app.add_option("--random-weights", o.random_weights,
                 "make weights up from this seed: for trials of speed and space")
      ->type_name("SEED")
      ->check(not_negative)
      ->group(input);
  app.add_option("--layers", o.layers,
                 "use only so many of the first layers: for trials; default: all")
      ->group(input);

  const auto sampling = "Sampling";
  app.add_option("--tokens-per-text", o.rules.tokens_per_text,
                 "tokens of each text whose pairs are kept, drawn without replacement; all of a "
                 "text with fewer")
      ->capture_default_str()
      ->group(sampling);
  app.add_option("--min-tokens", o.rules.min_tokens, "texts with fewer tokens are left out")
      ->capture_default_str()
      ->group(sampling);
  app.add_option("--max-tokens", o.rules.max_tokens, "texts with more tokens are left out")
      ->capture_default_str()
      ->group(sampling);
  app.add_option("--per-subset", o.rules.per_subset,
                 "texts of each subset at most, the first ones; texts without a subset are one")
      ->capture_default_str()
      ->group(sampling);
  app.add_option("--max-texts", o.rules.max_texts, "texts in all, the first ones; 0: all")
      ->capture_default_str()
      ->group(sampling);
  app.add_option("--seed", o.rules.seed, "of the draw of tokens")
      ->capture_default_str()
      ->check(not_negative)
      ->group(sampling);

  const auto output = "Output";
  app.add_option("-o,--output", o.output,
                 "HDF5 file of pairs; one that the same command has begun is continued; required")
      ->type_name("FILE")
      ->group(output);
  app.add_option("--compression", o.compression, "level of deflate, 0 (none) to 9")
      ->capture_default_str()
      ->group(output);
  app.add_option("--json", o.json, "write a report to this file; - is standard output")
      ->type_name("FILE")
      ->group(output);
  app.add_flag("-q,--quiet", o.quiet, "print errors only")->group(output);
  app.add_option("--config", o.config,
                 "TOML file with options, named as here without dashes; the command line wins")
      ->type_name("FILE")
      ->group(output);
}

int collect(const CollectOptions& options, const Communicator& comm, const std::string& version) {
  const auto start = Clock::now();
  const bool talks = comm.is_root() && !options.quiet;
  const auto warn = [&](const std::string& text) {
    if (talks) fmt::print(stderr, "kvzap: {}\n", text);
  };
  std::optional<ModelSetup> setup;
  comm.agree([&] {
    validate(options);
    setup = set_up_model(options.model, options.layers, "", comm.size());
  });
  if (talks) print_notes(*setup);

  PairsPlan plan = plan_of(options, *setup);
  CollectTexts texts;
  std::int64_t extents[2] = {0, 0};  // of the texts: most tokens, most pairs
  comm.agree_on_root([&] {
    check_writable(options.json);
    const Tokenizer tokenizer = Tokenizer::load(options.model);
    ChatTemplate chat_template;
    try {
      chat_template = ChatTemplate::detect(options.model);
    } catch (const Error& error) {
      const std::string what = error.what();
      throw Error(what.substr(0, what.find("; --raw")));  // no option of this command
    }
    texts =
        read_collect_texts(options.texts, options.rules, tokenizer, chat_template, setup->config);
    plan.command["the texts' hash"] = texts.hash;
    plan.command["the model's hash"] = hash_of_model(options.model, !options.random_weights);
    plan.texts = texts.plan;
    for (const CollectText& text : texts.texts) {
      extents[0] = std::max(extents[0], static_cast<std::int64_t>(text.ids.size()));
      extents[1] = std::max(extents[1], static_cast<std::int64_t>(text.positions.size()));
    }
  });
  comm.broadcast(extents, sizeof(extents), 0);
  const int ranks_on_node = comm.ranks_on_node();
  comm.agree([&] {
    check_texts_fit(options, setup->config, extents[0], extents[1], comm, ranks_on_node);
  });
  detail::set_blas_threads(cores_of_rank(ranks_on_node));

  std::vector<std::vector<int>> heads;
  for (int rank = 0; rank < comm.size(); ++rank) heads.push_back(setup->partition.heads(0, rank));
  const SignalWatch watch;
  const auto writer = PairsWriter::open(options.output, plan, heads, comm);
  for (const std::string& note : writer->notes()) warn(note);
  if (talks) {
    fmt::print(stderr, "kvzap: {} of {} texts{}\n", writer->planned_texts(), texts.lines,
               skipped_text(texts));
  }

  Progress bar(talks);
  const ProgressCallback progress = [&](std::string_view what, std::int64_t done,
                                        std::int64_t total) { bar.update(what, done, total); };
  CollectResult result;
  const auto collecting = Clock::now();
  if (writer->texts() < writer->planned_texts()) {
    switch (plan.dtype) {
      case DType::f32:
        result = run_texts<float>(options, *setup, texts, *writer, comm, progress);
        break;
      case DType::f16:
        result = run_texts<half>(options, *setup, texts, *writer, comm, progress);
        break;
      case DType::bf16:
        result = run_texts<bfloat16>(options, *setup, texts, *writer, comm, progress);
        break;
    }
  }
  const double seconds = seconds_since(collecting);
  bar.clear();
  const auto signal = static_cast<int>(
      result.stopped ? comm.all_reduce_max(std::int64_t{caught_signal}) : std::int64_t{0});

  if (result.stopped) {
    warn(fmt::format("stopped by signal {}: {} has {} of {} texts; the same command goes on",
                     signal, options.output, writer->safe_texts(), writer->planned_texts()));
  }
  if (result.non_finite_scores > 0) {
    warn(fmt::format("warning: {} scores are no finite numbers; kvzap train leaves their pairs out",
                     result.non_finite_scores));
  }
  comm.agree_on_root([&] {
    if (talks && result.texts > 0) {
      fmt::print(stderr, "kvzap: {} pairs of {} texts in {:.1f} s ({:.0f} tokens/s); {} has {}\n",
                 result.pairs, result.texts, seconds, static_cast<double>(result.tokens) / seconds,
                 options.output, human_bytes(writer->bytes()));
    }
    if (options.json.empty()) return;
    const nlohmann::ordered_json json = {
        {"kvzap", version},
        {"model", options.model},
        {"texts_file", options.texts},
        {"output", options.output},
        {"ranks", comm.size()},
        {"dtype", options.dtype},
        {"layers", plan.layers},
        {"hidden_size", plan.hidden_size},
        {"kv_heads", plan.kv_heads},
        {"complete", writer->safe_texts() == writer->planned_texts()},
        {"texts", writer->safe_texts()},
        {"planned_texts", writer->planned_texts()},
        {"skipped",
         {{"too_short", texts.too_short},
          {"too_long", texts.too_long},
          {"over_per_subset", texts.over_subset},
          {"over_max_texts", texts.over_max_texts}}},
        {"file_bytes", writer->bytes()},
        {"this_run",
         {{"texts", result.texts},
          {"pairs", result.pairs},
          {"tokens", result.tokens},
          {"non_finite_scores", result.non_finite_scores},
          {"seconds", seconds},
          {"write_seconds", result.write_seconds},
          {"total_seconds", seconds_since(start)}}}};
    write_whole(options.json,
                json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
    flush_stdout();
  });
  return result.stopped ? 128 + signal : 0;
}

}  // namespace kvzap::driver
