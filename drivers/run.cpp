#include "run.hpp"

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <kvzap/calibrate.hpp>
#include <kvzap/chat_template.hpp>
#include <kvzap/generate.hpp>
#include <kvzap/memory_plan.hpp>
#include <kvzap/snapshot.hpp>
#include <kvzap/tokenizer.hpp>
#include <limits>
#include <sstream>

#include "base/stopwatch.hpp"
#include "dump.hpp"
#include "linalg/host/blas_threads.hpp"
#include "model/safetensors_writer.hpp"
#include "policy_options.hpp"
#include "policy_setup.hpp"
#include "progress.hpp"
#include "report.hpp"
#include "setup.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using detail::Clock;
using detail::seconds_since;

/// The threshold that reaches --evict-ratio. Rank 0 alone reads the table, so that no rank has
/// another threshold while somebody replaces the file.
LookedUpThreshold share_threshold(const RunOptions& options, bool talks, const Communicator& comm) {
  LookedUpThreshold found;
  comm.agree_on_root([&] { found = look_up_threshold(options); });
  comm.broadcast(&found.threshold, sizeof(found.threshold), 0);
  if (!talks) return found;
  for (const auto& warning : found.warnings) fmt::print(stderr, "kvzap: warning: {}\n", warning);
  return found;
}

/// Weights and what prefill needs at least; how much pruning will keep is not known.
std::int64_t least_bytes(const MemoryPlan& plan, bool pruned) {
  std::int64_t most = 0;
  for (const auto& rank : plan.ranks) {
    most = std::max(most, rank.weights + rank.activations + rank.attention +
                              (pruned ? rank.dense_layer : rank.kv_full));
  }
  return most;
}

MemoryPlan plan(const RunOptions& options, const ModelConfig& config, std::int64_t tokens,
                int ranks, const PlannedEviction& eviction) {
  return plan_memory(config, dtype_from_name(options.dtype), tokens, eviction.ratio, ranks,
                     eviction.window, options.prefill == "sparse" ? options.chunk : 0);
}

CacheOptions cache_options(const RunOptions& options) {
  CacheOptions cache;
  cache.prune = !prunes(options)            ? PruneMode::none
                : options.prune == "always" ? PruneMode::always
                                            : PruneMode::prefill;
  cache.prefill = options.prefill == "sparse" ? PrefillMode::sparse : PrefillMode::dense;
  cache.chunk = options.chunk;
  cache.threshold = static_cast<float>(options.threshold.value_or(0));
  cache.window = options.window;
  cache.sink = options.sink;
  cache.trim = options.trim;
  cache.page_rows = options.page_rows;
  cache.order = options.page_order == "dim" ? PageOrder::dim_major : PageOrder::token_major;
  cache.prune_after =
      options.prune_after == "question" ? PruneMoment::question : PruneMoment::context;
  cache.decode_every = options.decode_every;
  cache.decode_keep = options.decode_keep.value_or(0);
  cache.decode_evict_ratio = options.decode_evict_ratio.value_or(0);
  return cache;
}

/// Loads what scores, before the weights: it is small, and whether it fits the model and its budget
/// the context of `tokens` tokens is known before minutes of loading. Returns the scorer, if there
/// is one; a policy goes into `cache`. Does not communicate.
std::shared_ptr<Scorer> load_policy(const RunOptions& options,
                                    const std::optional<PolicySpec>& spec,
                                    const std::optional<RepeatPrompt>& repeat,
                                    const ModelSetup& setup, std::int64_t tokens,
                                    const Communicator& comm, CacheOptions& cache) {
  if (cache.prune == PruneMode::none) return nullptr;
  if (!spec) return load_surrogate(options.surrogate, setup, dtype_from_name(options.dtype), comm);
  const auto choice = load_choice(options, *spec, repeat, setup, comm);
  check_budget(*choice, options, setup, tokens);
  cache.policy = choice;
  if (!choice->budget.has_amount()) cache.threshold = static_cast<float>(choice->threshold);
  return choice->scorer;
}

/// Whether the cache is whole before anything is evicted of it.
bool is_full_at_first(const CacheOptions& cache) {
  return cache.prune == PruneMode::none ||
         (cache.prefill == PrefillMode::dense && cache.policy &&
          cache.policy->budget.has_amount() &&
          (!cache.policy->budget.by_layer() || cache.policy->info->repeats_context));
}

template <class Value>
std::unique_ptr<Generator> make_generator(const RunOptions& options, const CacheOptions& cache,
                                          std::shared_ptr<Scorer> scorer, const Texts& texts,
                                          const ModelSetup& setup, const Communicator& comm,
                                          const ProgressCallback& progress, RunReport& report) {
  auto start = Clock::now();
  std::unique_ptr<Generator> generator;
  std::shared_ptr<const Model<Value>> model;
  std::int64_t weight_bytes = 0;
  comm.agree([&] {
    model = std::make_shared<const Model<Value>>(
        Model<Value>::load(options.model, setup.config, setup.partition, comm.rank(),
                           options.random_weights, progress));
    weight_bytes = model->bytes();
    generator = Generator::create<Value>(model, std::move(scorer), cache, comm);
  });
  for (const auto& rank : comm.all_gather({weight_bytes})) {
    report.weight_bytes.push_back(rank.front());
  }
  report.load_seconds = seconds_since(start);
  if (!texts.empty()) {
    start = Clock::now();
    kvzap::calibrate<Value>(model, *cache.policy, texts, comm, progress);
    report.texts_seconds = seconds_since(start);
    report.texts = static_cast<std::int64_t>(texts.size());
  }
  return generator;
}

void dry_run(const RunOptions& options, const std::optional<PolicySpec>& spec,
             const ModelSetup& setup, const Tokenizer* tokenizer, std::int64_t limit,
             const Communicator& comm) {
  const ModelConfig& config = setup.config;
  std::int64_t tokens = options.max_context.value_or(0);
  if (tokens == 0 && (options.prompt || !options.file.empty())) {
    const Prompt prompt = share_prompt(options, tokenizer, config, limit, comm);
    for (const auto& question : prompt.questions) {
      tokens = std::max<std::int64_t>(tokens,
                                      prompt.context.size() + question.size() + options.new_tokens);
    }
  }
  if (tokens == 0) tokens = config.longest_context();
  const DType dtype = dtype_from_name(options.dtype);
  const ModelConfig whole = whole_config(setup);
  const PolicySetup policy_setup{whole, setup.partition_of_all_layers, dtype, options.model, comm};
  MemoryPlan planned;
  PlannedEviction eviction;
  comm.agree([&] {
    eviction = planned_eviction(options, spec, policy_setup, config, tokens);
    planned = plan(options, config, tokens, comm.size(), eviction);
  });
  comm.agree_on_root([&] {
    if (options.json != "-") {
      const std::string text = to_text(planned, config, dtype, tokens, eviction.ratio);
      std::fwrite(text.data(), 1, text.size(), stdout);
      if (spec && spec->info->repeats_context && prunes(options)) {
        fmt::print(
            "note: full at first; while the context is repeated, rows of up to {} more tokens and "
            "of the prompt exist\n",
            std::min(tokens, spec->arguments.integer("chunk")));
      }
    }
    if (!options.json.empty()) {
      write_whole(options.json, to_json(planned, options, tokens, eviction.ratio).dump(2) + "\n");
    }
    flush_stdout();
  });
}

}  // namespace

void run(const RunOptions& given, const Communicator& comm, const std::string& version) {
  RunOptions options = given;
  const bool talks = comm.is_root() && !options.quiet;

  // 1. Check what can be checked before the work starts.
  RunReport report;
  report.version = version;
  report.ranks = comm.size();
  std::optional<ModelSetup> setup;
  std::optional<Tokenizer> tokenizer;
  std::vector<TokenId> stop_ids;
  std::int64_t limit = 0;
  std::optional<PolicySpec> spec;
  comm.agree([&] { validate(options); });
  if (looks_up_threshold(options) && prunes(options) && !options.dry_run) {
    report.looked_up = share_threshold(options, talks, comm);
    options.threshold = report.looked_up->threshold;
    options.evict_ratio.reset();  // which is no budget
  }
  comm.agree([&] {
    spec = policy_spec(options);
    report.cache_options = cache_options(options);
    setup =
        set_up_model(options.model, options.layers, options.placement, comm.size(), options.rope);
    const ModelConfig& config = setup->config;
    limit = options.max_context.value_or(0);
    if (!options.random_weights) {
      if (limit > config.longest_context()) {
        throw Error(fmt::format("-c is {}; the model's {} is {}", limit, name_of_longest(config),
                                config.longest_context()));
      }
      if (limit == 0) limit = config.longest_context();
    }
    if (!options.ignore_eos) stop_ids = load_stop_ids(options.model, config.vocab_size);
  });
  comm.agree_on_root([&] {
    const bool has_prompt = options.prompt || !options.file.empty();
    if (has_prompt && !options.token_ids) tokenizer = Tokenizer::load(options.model);
    check_writable(options.json);
  });
  const ModelConfig& config = setup->config;
  report.model = config;
  report.all_layers = setup->all_layers;
  if (talks) print_notes(*setup);
  const Tokenizer* const text_tokenizer = tokenizer ? &*tokenizer : nullptr;
  if (options.dry_run) return dry_run(options, spec, *setup, text_tokenizer, limit, comm);
  if (!options.dump.empty()) {
    comm.agree_on_root([&] {
      for (const auto& note : detail::check_safetensors_writable(options.dump, "--dump")) {
        if (talks) fmt::print(stderr, "kvzap: warning: {}\n", note);
      }
    });
  }
  if (!options.snapshot.empty()) {
    for (const std::string& note : check_snapshot_writable(options.snapshot, comm)) {
      if (talks) fmt::print(stderr, "kvzap: warning: {}\n", note);
    }
  }
  const Prompt prompt = share_prompt(options, text_tokenizer, config, limit, comm);
  report.context_tokens = prompt.context.size();
  std::int64_t longest = 0;
  for (const auto& question : prompt.questions) {
    longest = std::max<std::int64_t>(longest,
                                     prompt.context.size() + question.size() + options.new_tokens);
  }
  report.cache_options.window = ring_rows(options.window, longest);
  const int ranks_on_node = comm.ranks_on_node();
  const auto repeat =
      share_repeat_prompt(options, spec, text_tokenizer, prompt.context, config, comm);
  std::shared_ptr<Scorer> scorer;
  comm.agree([&] {
    scorer = load_policy(options, spec, repeat, *setup, report.context_tokens, comm,
                         report.cache_options);
    report.is_full_at_first = is_full_at_first(report.cache_options);
  });
  const std::int64_t repeat_tokens =
      repeat ? longest_repeat(report.context_tokens, report.cache_options.policy->repeat) : 0;
  if (repeat && talks && !options.random_weights &&
      report.context_tokens + repeat_tokens > config.longest_context()) {
    fmt::print(stderr,
               "kvzap: warning: the repeat of the context ends at position {}, and the model's "
               "{} is {}: what it scores there may mean little\n",
               report.context_tokens + repeat_tokens, name_of_longest(config),
               config.longest_context());
  }
  const Texts texts =
      load_policy_texts(options, report.cache_options.policy.get(), text_tokenizer, config, comm);
  comm.agree([&] {
    // Rows of a repeat stand behind the context's for a while.
    const std::int64_t tokens = report.context_tokens + repeat_tokens;
    const MemoryPlan planned = plan(options, config, tokens, comm.size(), {});
    check_memory(least_bytes(planned, !report.is_full_at_first), ranks_on_node,
                 "weights and cache (--dry-run prints the plan)");
    std::size_t most = 0;
    for (const auto& text : texts) most = std::max(most, text.size());
    if (most == 0) return;
    const MemoryPlan of_texts =
        plan(options, config, static_cast<std::int64_t>(most), comm.size(), {});
    check_memory(least_bytes(of_texts, true), ranks_on_node,
                 fmt::format("weights and the longest of the policy's texts, {} tokens", most));
  });
  if (report.cache_options.prune != PruneMode::none) report.policy = policy_text(options);
  if (scorer && !options.surrogate.empty()) report.surrogate_kind = scorer->kind();
  detail::set_blas_threads(cores_of_rank(ranks_on_node));

  // 2. Load this rank's share of the weights, and let the policy learn from its texts.
  Progress bar(talks);
  const ProgressCallback progress = [&](std::string_view what, std::int64_t done,
                                        std::int64_t total) { bar.update(what, done, total); };
  std::unique_ptr<Generator> generator;
  switch (dtype_from_name(options.dtype)) {
    case DType::f32:
      generator = make_generator<float>(options, report.cache_options, scorer, texts, *setup, comm,
                                        progress, report);
      break;
    case DType::f16:
      generator = make_generator<half>(options, report.cache_options, scorer, texts, *setup, comm,
                                       progress, report);
      break;
    case DType::bf16:
      generator = make_generator<bfloat16>(options, report.cache_options, scorer, texts, *setup,
                                           comm, progress, report);
      break;
  }

  // 3. Prefill the context and prune it.
  std::optional<Dump> dump;
  if (!options.dump.empty()) {
    dump.emplace(prompt.context, prompt.questions.size(), report.cache_options, setup->partition,
                 comm);
    generator->set_observer(&*dump);
  }
  const auto start = Clock::now();
  generator->prefill(prompt.context, prompt.questions.size() > 1, progress);
  // What is pruned after the question runs together with it.
  const bool is_after_question = report.cache_options.prune_after == PruneMoment::question;
  if (!is_after_question) {
    report.prefill_seconds = seconds_since(start);
    report.context = generator->report();
  }
  bar.clear();
  if (dump) dump->take_prefill(*generator);
  bool is_snapshot_due = !options.snapshot.empty();
  const auto write_snapshot = [&] {
    if (is_snapshot_due) generator->write_snapshot(options.snapshot, options.model);
    is_snapshot_due = false;
  };
  if (!is_after_question) write_snapshot();

  // 4. Answer each question from the same pruned context, printing tokens as they come.
  const bool prints = comm.is_root() && options.json != "-";
  for (std::size_t i = 0; i < prompt.questions.size(); ++i) {
    AnsweredQuestion answered;
    if (!options.questions.empty()) answered.question = options.questions[i];
    std::optional<Tokenizer::StreamDecoder> decoder;
    if (tokenizer) decoder.emplace(*tokenizer);
    const auto emit = [&](const std::string& piece) {
      answered.text += piece;
      if (!prints) return;
      std::fwrite(piece.data(), 1, piece.size(), stdout);
      std::fflush(stdout);
    };
    AnswerOptions answer_options;
    answer_options.max_new_tokens = options.new_tokens;
    answer_options.stop_ids = stop_ids;
    answer_options.max_tokens = limit;
    answer_options.sampling = options.sampling;
    answer_options.on_token = [&](TokenId token) {
      write_snapshot();
      if (decoder) {
        emit(decoder->append(token));
      } else if (comm.is_root()) {
        emit(fmt::format("{}{}", answered.text.empty() ? "" : " ", token));
      }
    };
    if (dump) dump->begin_answer(prompt.questions[i], *generator, answer_options);
    answered.answer = generator->answer(prompt.questions[i], answer_options);
    write_snapshot();  // if there was no token
    if (dump) dump->end_answer(*generator, answered.answer);
    if (is_after_question && i == 0) report.context = answered.answer.pruned;
    if (decoder) emit(decoder->finish());
    if (prints) std::fwrite("\n", 1, 1, stdout);
    report.answers.push_back(std::move(answered));
  }

  // 5. Report.
  if (dump) {
    dump->write(options.dump, {{"format", "kvzap.dump"},
                               {"format_version", "1"},
                               {"kvzap", version},
                               {"model", options.model},
                               {"dtype", options.dtype},
                               {"policy", report.policy.empty() ? "none" : report.policy}});
  }
  for (const auto& rank : comm.all_gather({peak_rss_bytes()})) {
    report.peak_rss_bytes.push_back(rank.front());
  }
  comm.agree_on_root([&] {
    flush_stdout();
    if (talks) fmt::print(stderr, "{}", to_text(report, options));
    if (!options.json.empty()) {
      write_whole(
          options.json,
          to_json(report, options).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) +
              "\n");
    }
    flush_stdout();
  });
}

}  // namespace kvzap::driver
