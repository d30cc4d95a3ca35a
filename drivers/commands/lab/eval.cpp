#include "commands/lab/eval.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <kvzap/engine/comparison.hpp>
#include <kvzap/engine/learn_from_texts.hpp>
#include <kvzap/model/memory_plan.hpp>
#include <map>
#include <set>

#include "base/stopwatch.hpp"
#include "commands/lab/eval_exchange.hpp"
#include "commands/lab/eval_prompts.hpp"
#include "commands/lab/eval_record.hpp"
#include "commands/lab/eval_settings.hpp"
#include "commands/support/model_loading.hpp"
#include "commands/support/policy_setup.hpp"
#include "commands/support/setup.hpp"
#include "console/console.hpp"
#include "console/progress.hpp"
#include "console/signals.hpp"
#include "eval/records.hpp"
#include "eval/summary.hpp"
#include "files/counted.hpp"
#include "files/json_file.hpp"
#include "files/temporary_file.hpp"
#include "options/options.hpp"
#include "options/policy_options.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;
using eval::EvalRecord;
using eval::EvalSetting;
using eval::EvaluationFolder;
using eval::EvaluationSummary;
using nlohmann::ordered_json;

std::string name_of_share(PrefillShare share) {
  switch (share) {
    case PrefillShare::context:
      return "context";
    case PrefillShare::whole:
      return "whole";
    case PrefillShare::none:
      break;
  }
  return "none";
}

/// Settings that share an engine, because their rows have the same type.
struct EngineGroup {
  std::vector<std::size_t> settings;  // indices
  std::unique_ptr<Comparison> comparison;
};

/// An evaluation on all ranks.
class Evaluation {
 public:
  Evaluation(const EvalOptions& options, const Communicator& comm, const std::string& version,
             const EvalHost* host)
      : m_options(options),
        m_host(host),
        m_comm(comm),
        m_work(options.parallel == "prompts" ? Communicator::self() : comm),
        m_version(version),
        m_files(file_list(options.tasks)),
        m_talks(comm.is_root() && !options.quiet && !host) {}

  int run() {
    prepare();
    load_policies();
    std::optional<SignalWatch> watch;
    if (!m_host) watch.emplace();
    open_folder();
    if (m_talks) {
      print_plan(m_prompts.prompts.size(), m_prompts.prompts.size() - m_left.size(), m_settings,
                 m_prune, m_options);
    }
    share_rounds();
    int signal = 0;
    try {
      if (m_rounds > 0) signal = answer_all();
    } catch (const AgreedError&) {
      // Summarizes the records so far. On a full disk this may fail, too.
      if (m_comm.is_root()) {
        try {
          write_summary();
        } catch (const Error&) {
        }
      }
      throw;
    }
    m_comm.agree_on_root([&] { finish(signal); });
    return signal == 0 ? 0 : 128 + signal;
  }

 private:
  // 1. Checks before the work starts.
  void prepare();
  // 2. Loads the policies of all settings, and checks that they suit every prompt.
  void load_policies();
  LoadedPruning load_setting(std::size_t index, const std::optional<RepeatPrompt>& repeat);
  void check_prompts() const;
  // 3. Reads finished prompts, and plans the others.
  void open_folder();
  void add_policy_files(ordered_json& options) const;
  ordered_json description() const;
  void share_rounds();
  std::vector<std::vector<std::size_t>> queues() const;
  void check_memory_of_ranks();
  std::size_t cache_limit(const PageFormat& format) const;
  // 4. Runs the other prompts.
  int answer_all();
  void on_workers(const std::function<void()>& work) const;
  std::vector<EngineGroup> make_groups(const ProgressCallback& progress);
  std::vector<EvalJob> jobs_of(std::int64_t round,
                               const std::vector<std::vector<std::size_t>>& queues) const;
  std::vector<SettingAnswer> answer(const std::vector<EngineGroup>& groups, const EvalJob& job,
                                    Progress& bar) const;
  void record(const EvalPrompt& prompt, const std::vector<SettingAnswer>& answers);
  // 5. Results.
  ordered_json write_summary() const;
  void finish(int signal) const;

  PageFormat format_of(std::size_t setting) const {
    return page_format(name_of_kv_type(m_settings[setting], m_options), m_options.dtype);
  }
  std::vector<PageFormat> formats() const;
  MemoryPlan plan_of(const PageFormat& format, const std::vector<std::int64_t>& weights) const;
  int workers() const { return m_options.parallel == "prompts" ? m_comm.size() : 1; }
  void warn(const std::string& text) const {
    if (m_host && m_comm.is_root()) m_host->warn(text);
    if (m_talks) say("kvzap: warning: {}\n", text);
  }
  void show(Progress& bar, std::string_view what, std::int64_t done, std::int64_t total,
            std::string_view unit) const {
    bar.update(what, done, total, unit);
    if (m_host) m_host->progress(what, done, total);
  }

  const EvalOptions& m_options;
  const EvalHost* m_host;
  const Communicator& m_comm;  // all ranks
  Communicator m_work;         // the ranks that share a model with this one
  const std::string& m_version;
  const std::vector<std::string> m_files;
  bool m_talks;

  std::optional<ModelSetup> m_setup;
  std::int64_t m_limit = 0;
  std::vector<TokenId> m_stop_ids;
  std::int64_t m_longest = 0;  // most tokens of a prompt with its answer
  int m_ranks_on_node = 1;

  std::vector<EvalSetting> m_settings;
  std::vector<EngineOptions> m_engine_options;  // of each setting
  std::vector<LoadedPruning> m_prune;           // of each setting
  std::vector<Texts> m_texts;                   // of each setting
  std::int64_t m_rounds = 0;  // remaining rounds; in each round a worker has one prompt

  // On rank 0.
  std::optional<Tokenizer> m_tokenizer;
  EvalPrompts m_prompts;
  std::unique_ptr<EvaluationFolder> m_folder;
  std::unique_ptr<EvaluationSummary> m_summary;
  std::vector<std::size_t> m_left;  // prompts that are not done
};

void Evaluation::prepare() {
  m_comm.agree([&] {
    m_settings = settings_of(m_options, m_host ? m_host->policies : eval::OwnPolicies());
  });
  for (const auto& warning : look_up_thresholds(m_settings, m_options, m_comm)) warn(warning);
  agree_on_usage(m_comm, [&] {
    m_setup = set_up_model(m_options.model, m_options.layers, m_options.placement, m_work.size(),
                           m_options.rope);
    const ModelConfig& config = m_setup->config;
    m_limit = context_limit(m_options.max_context, config, m_options.random_weights.has_value());
    m_stop_ids = load_stop_ids(m_options.model, config.vocab_size);
    for (const EvalSetting& setting : m_settings) {
      EngineOptions& run = m_engine_options.emplace_back(m_options);
      run.pruning = setting.pruning;
      check(run.pruning, {}, flag_names());
    }
  });
  if (m_comm.is_root()) print_notes(*m_setup, m_talks);
  // Answers are those of kvpress' pipeline, which takes the largest of the model's own logits.
  const std::string left_aside =
      m_talks ? rules_left_aside(m_options.model, m_setup->config.vocab_size) : "";
  if (!left_aside.empty()) {
    say("kvzap: note: eval chooses tokens by the model's logits alone, as kvpress does; {}\n",
        left_aside);
  }
  m_comm.agree_on_root([&] {
    check_writable(m_options.json);
    m_tokenizer = Tokenizer::load(m_options.model);
    m_prompts = read_eval_prompts(m_options, *m_tokenizer, m_setup->config, m_limit);
    for (const EvalPrompt& prompt : m_prompts.prompts) {
      const EvalTokens& tokens = prompt.tokens;
      m_longest = std::max(
          m_longest, static_cast<std::int64_t>(tokens.context.size() + tokens.question.size() +
                                               tokens.continuation.size()) +
                         tokens.new_tokens);
    }
    if (m_limit > 0) m_longest = std::min(m_longest, m_limit);  // generation ends there
  });
  m_comm.broadcast(&m_longest, sizeof(m_longest), 0);
  const std::size_t left_out = m_prompts.left_out.size();
  constexpr std::size_t shown = 5;
  for (std::size_t i = 0; i < std::min(shown, left_out); ++i) warn(m_prompts.left_out[i]);
  if (left_out > 0) warn(files::counted(left_out, "prompt") + " left out");
}

LoadedPruning Evaluation::load_setting(std::size_t index,
                                       const std::optional<RepeatPrompt>& repeat) {
  const EngineOptions& run = m_engine_options[index];
  if (!run.pruning.has_policy()) {
    LoadedPruning full{run.pruning, nullptr};
    full.pruning.mode = PruneMode::none;
    return full;
  }
  // A surrogate may be large, and its scores do not depend on the number of policies that use them.
  if (!run.pruning.info()->surrogate.empty() && run.pruning.policy.modifiers().empty()) {
    for (std::size_t i = 0; i < index; ++i) {
      const Pruning& other = m_settings[i].pruning;
      if (!m_prune[i].policy || other.policy != run.pruning.policy ||
          other.surrogate != run.pruning.surrogate) {
        continue;
      }
      return m_prune[i].with_amount_of(run.pruning);
    }
  }
  return load_policy(run, repeat, *m_setup, m_work);
}

void Evaluation::load_policies() {
  // All policies and contexts have the same prompt.
  std::optional<RepeatPrompt> repeat;
  for (std::size_t i = 0; i < m_settings.size() && !repeat; ++i) {
    const std::vector<TokenId> none;
    repeat = share_repeat_prompt(
        m_engine_options[i], *m_setup, m_tokenizer ? &*m_tokenizer : nullptr,
        m_comm.is_root() ? m_prompts.prompts.front().tokens.context : none, m_comm);
  }
  for (std::size_t i = 0; i < m_settings.size(); ++i) {
    const EvalSetting& setting = m_settings[i];
    LoadedPruning prune;
    m_comm.agree([&] {
      try {
        prune = load_setting(i, repeat);
        prune.pruning.window = ring_rows(prune.pruning.window, m_longest);
      } catch (const Error& error) {
        throw Error(fmt::format("--policies: {}: {}", setting.label, error.what()));
      }
    });
    m_prune.push_back(prune);
    m_texts.push_back(load_policy_texts(m_engine_options[i], prune.policy.get(), *m_setup,
                                        m_tokenizer ? &*m_tokenizer : nullptr, m_comm));
  }
  m_comm.agree_on_root([&] { check_prompts(); });
}

void Evaluation::check_prompts() const {
  std::set<std::size_t> lengths;
  for (const EvalPrompt& prompt : m_prompts.prompts) {
    const std::size_t length = prompt.tokens.context.size();
    if (!lengths.insert(length).second) continue;
    for (std::size_t i = 0; i < m_settings.size(); ++i) {
      if (!m_prune[i].policy) continue;
      try {
        check_budget(m_prune[i].policy->budget, m_setup->config, dtype_from_name(m_options.dtype),
                     static_cast<std::int64_t>(length), format_of(i));
        if (m_prune[i].policy->info->repeats_context &&
            static_cast<std::int64_t>(length) <= m_prune[i].policy->repeat.prefix) {
          throw Error("the context has nothing to repeat");
        }
      } catch (const Error& error) {
        throw Error(fmt::format("{}: {}: {}", prompt.where(), m_settings[i].label, error.what()));
      }
    }
  }
}

// Hashes of the files that policies read: names alone do not identify a policy.
void Evaluation::add_policy_files(ordered_json& options) const {
  std::map<std::string, std::string> hashes;
  const auto add = [&](const auto& info, const PolicyArguments& arguments, bool is_own) {
    for (const PolicyParameter& parameter : info.parameters) {
      const std::string& file = arguments.text(parameter.name);
      if (!parameter.names_file(file)) continue;
      if (is_own) {
        hashes.emplace(file, hash_of_policy_file(file));
      } else {
        options["surrogate"] = file;
        options["surrogate_hash"] = hash_of_policy_file(file);
      }
    }
  };
  for (std::size_t i = 0; i < m_settings.size(); ++i) {
    const Pruning& pruning = m_settings[i].pruning;
    if (!pruning.has_policy()) continue;
    const PolicySpec spec = pruning.spec(flag_names());
    add(*spec.info, spec.arguments,
        pruning.surrogate.empty() || pruning.surrogate != m_options.pruning.surrogate);
    for (const auto& [info, arguments] : spec.modifiers) add(*info, arguments, true);
  }
  if (!hashes.empty()) options["policy_files"] = hashes;
  if (m_host && !m_host->hashes.empty()) options["own_policies"] = m_host->hashes;
}

ordered_json Evaluation::description() const {
  const EvalOptions& o = m_options;
  const ModelConfig& config = m_setup->config;
  const fs::path folder = fs::weakly_canonical(o.model);
  ordered_json options = {{"dtype", o.dtype},
                          {"raw", o.raw},
                          {"thinking", o.thinking},
                          {"max_context", m_limit},
                          {"window", o.pruning.window},
                          {"sink", o.pruning.sink},
                          {"chunk", o.pruning.chunk},
                          {"tries", o.tries},
                          {"temperature", o.sampling.temperature},
                          {"top_k", o.sampling.top_k},
                          {"top_p", o.sampling.top_p},
                          {"seed", o.sampling.seed}};
  const auto add = [&](const char* name, const auto& value) {
    if (value) options[name] = *value;
  };
  // Absent if 0: folders of earlier versions lack this option and can be continued.
  if (o.sampling.min_p != 0) options["min_p"] = o.sampling.min_p;
  add("random_weights", o.random_weights);
  if (o.weights != "stored") options["weights"] = o.weights;
  if (page_format(o.kv_type, o.dtype).quantised())
    options["kv_type"] = kv_type_name(o.kv_type, o.dtype);
  const ReadPages read = read_pages(o.read_pages);
  if (!read.all()) {
    options["read_pages"] = name_of(read);
    options["page_rows"] = o.page_rows;  // decides what is read
  }
  add("n_predict", o.new_tokens);
  add("max_prompts", o.max_prompts);
  add("per_task", o.per_task);
  if (!o.prompt_templates.empty()) {
    options["prompt_templates"] = o.prompt_templates;
    options["prompt_templates_hash"] = m_prompts.templates_hash;
  }
  add_policy_files(options);
  ordered_json settings = ordered_json::array();
  for (std::size_t i = 0; i < m_settings.size(); ++i) {
    settings.push_back(to_json(m_settings[i]));
    settings.back()["shares"] = name_of_share(prefill_share(m_prune[i]));
  }
  return {{"format", "kvzap.evaluation"},
          {"format_version", 1},
          {"version", m_version},
          {"model",
           {{"name", folder.filename().string()},
            {"folder", o.model},
            {"config_hash", hash_of_model(o.model, !o.random_weights)},
            {"layers", config.num_hidden_layers},
            {"kv_heads", config.num_key_value_heads},
            {"max_position_embeddings", config.max_position_embeddings},
            {"rope_scaling", rope_json(config)}}},
          {"options", options},
          {"tasks", m_prompts.files},
          {"settings", settings}};
}

void Evaluation::open_folder() {
  m_comm.agree_on_root([&] {
    eval::SummaryOptions summary;
    summary.seed = m_options.sampling.seed;
    summary.resamples = m_options.bootstrap_samples;
    summary.pass_k = m_options.pass_k;
    summary.prompts = static_cast<std::int64_t>(m_prompts.prompts.size());
    m_summary = std::make_unique<EvaluationSummary>(m_settings, summary);
    std::vector<std::string> labels;
    for (const EvalSetting& setting : m_settings) labels.push_back(setting.label);
    using Key = std::pair<std::string, std::int64_t>;
    std::set<Key> known, done;
    for (const EvalPrompt& prompt : m_prompts.prompts) {
      m_summary->add_task(prompt.name);
      known.emplace(prompt.file, prompt.task.line);
    }

    m_folder = std::make_unique<EvaluationFolder>(m_options.output);
    m_folder->begin(description());
    const std::int64_t torn = m_folder->read(labels, [&](EvalRecord&& record) {
      const Key key(record.task_file, record.line);
      if (known.count(key) == 0) {
        throw Error(fmt::format("{}: has a record of {}, line {}, which is not among the tasks",
                                m_folder->records_file().string(), key.first, key.second));
      }
      done.insert(key);
      m_summary->add(record);
    });
    if (torn > 0) {
      warn(fmt::format("{}: an incomplete prompt of a killed run has been cut off",
                       m_folder->records_file().string()));
    }
    for (std::size_t i = 0; i < m_prompts.prompts.size(); ++i) {
      const EvalPrompt& prompt = m_prompts.prompts[i];
      if (done.count({prompt.file, prompt.task.line}) == 0) m_left.push_back(i);
    }
  });
}

// Distributes the prompts. Prompts with one context follow one another on one worker. Adjacent
// prompts, which usually have similar lengths, run at the same time.
std::vector<std::vector<std::size_t>> Evaluation::queues() const {
  std::vector<std::vector<std::size_t>> queues(static_cast<std::size_t>(workers()));
  std::size_t worker = 0;
  for (std::size_t i = 0; i < m_left.size(); ++i) {
    if (i > 0) {
      const auto& before = m_prompts.prompts[m_left[i - 1]].tokens.context;
      if (m_prompts.prompts[m_left[i]].tokens.context != before)
        worker = (worker + 1) % queues.size();
    }
    queues[worker].push_back(m_left[i]);
  }
  return queues;
}

void Evaluation::share_rounds() {
  for (const auto& queue : queues()) {
    m_rounds = std::max(m_rounds, static_cast<std::int64_t>(queue.size()));
  }
  m_comm.broadcast(&m_rounds, sizeof(m_rounds), 0);
}

// The distinct types of rows, in the order of the settings.
std::vector<PageFormat> Evaluation::formats() const {
  std::vector<PageFormat> formats;
  for (std::size_t i = 0; i < m_settings.size(); ++i) {
    const PageFormat format = format_of(i);
    if (std::find(formats.begin(), formats.end(), format) == formats.end()) {
      formats.push_back(format);
    }
  }
  return formats;
}

MemoryPlan Evaluation::plan_of(const PageFormat& format,
                               const std::vector<std::int64_t>& weights) const {
  return plan_memory(
      m_setup->config,
      {dtype_from_name(m_options.dtype), m_longest, 0, m_work.size(), m_options.pruning.window, 0,
       weights, format, bounded_page_rows(m_options.read_pages, m_options.page_rows)});
}

void Evaluation::check_memory_of_ranks() {
  const int ranks_on_node = m_ranks_on_node = m_comm.ranks_on_node();
  use_threads(m_options.threads, m_comm, m_comm.is_root() && !m_options.quiet);
  m_comm.agree([&] {
    const auto weights = quantised_bytes(m_options, m_setup->config, m_work.size());
    std::vector<std::int64_t> needs(static_cast<std::size_t>(m_work.size()), 0);
    // Each type of rows has its own engine, which shares the weights.
    for (const PageFormat& format : formats()) {
      const MemoryPlan plan = plan_of(format, weights);
      for (std::size_t r = 0; r < needs.size(); ++r) {
        const auto& rank = plan.ranks[r];
        if (needs[r] == 0) needs[r] = rank.weights;
        needs[r] += rank.activations + rank.attention + rank.kv_unpruned;
      }
    }
    check_memory(*std::max_element(needs.begin(), needs.end()), ranks_on_node,
                 "weights and the cache of the longest prompt");
  });
}

// Returns the limit on cache memory for each type of rows. Called with the weights loaded. It
// limits the settings that decode together; one setting may always try.
std::size_t Evaluation::cache_limit(const PageFormat& format) const {
  const std::int64_t available = available_bytes_of_node();
  if (available < 0) return 0;
  const MemoryPlan plan = plan_of(format, {});
  const auto& own = plan.ranks[static_cast<std::size_t>(m_work.rank())];
  constexpr double share = 0.9;  // steps need memory, too
  const auto left = static_cast<std::int64_t>(share * static_cast<double>(available)) /
                    m_ranks_on_node / static_cast<std::int64_t>(formats().size());
  return static_cast<std::size_t>(
      std::max(left - own.activations - own.attention, 3 * own.kv_unpruned));
}

// Runs work on all workers. An error on one worker ends all. (Ranks of the same worker agree by
// themselves.)
void Evaluation::on_workers(const std::function<void()>& work) const {
  if (workers() > 1) {
    m_comm.agree(work);
  } else {
    work();
  }
}

std::vector<EngineGroup> Evaluation::make_groups(const ProgressCallback& progress) {
  std::shared_ptr<const Model> model;
  on_workers([&] {
    model = load_model(*m_setup, dtype_from_name(m_options.dtype), m_options.random_weights,
                       weight_storage_from_name(m_options.weights), m_work, progress);
    for (std::size_t i = 0; i < m_prune.size(); ++i) {
      if (!m_texts[i].empty()) {
        kvzap::learn_from_texts(model, *m_prune[i].policy, m_texts[i], m_work, progress);
      }
    }
  });
  std::vector<EngineGroup> groups;
  std::vector<CacheOptions> caches;  // of the groups; all ranks have loaded their weights
  for (const PageFormat& format : formats()) {
    EngineGroup& group = groups.emplace_back();
    for (std::size_t i = 0; i < m_settings.size(); ++i) {
      if (format_of(i) == format) group.settings.push_back(i);
    }
    CacheOptions& cache = caches.emplace_back();
    cache.pruning.window = ring_rows(m_options.pruning.window, m_longest);
    cache.page_format = format;
    cache.page_rows = m_options.page_rows;
    cache.read_pages = read_pages(m_options.read_pages);
    cache.balance = m_options.balance;
    cache.kv_limit = cache_limit(format);
  }
  on_workers([&] {
    for (std::size_t g = 0; g < groups.size(); ++g) {
      std::vector<LoadedPruning> settings;
      for (const std::size_t i : groups[g].settings) settings.push_back(m_prune[i]);
      groups[g].comparison = std::make_unique<Comparison>(
          Engine::create(model, nullptr, caches[g], m_work), std::move(settings), m_options.batch);
    }
  });
  return groups;
}

std::vector<EvalJob> Evaluation::jobs_of(
    std::int64_t round, const std::vector<std::vector<std::size_t>>& queues) const {
  std::vector<EvalJob> jobs(queues.size());
  const auto at = static_cast<std::size_t>(round);
  for (std::size_t worker = 0; worker < queues.size(); ++worker) {
    const auto& queue = queues[worker];
    if (at >= queue.size()) continue;
    EvalJob& job = jobs[worker];
    job.prompt = static_cast<std::int64_t>(queue[at]);
    const EvalPrompt& prompt = m_prompts.prompts[queue[at]];
    const auto file = std::find(m_files.begin(), m_files.end(), prompt.file);
    job.file = file - m_files.begin();
    job.line = prompt.task.line;
    job.tokens = prompt.tokens;
    job.has_new_context =
        at == 0 || m_prompts.prompts[queue[at - 1]].tokens.context != job.tokens.context;
  }
  return jobs;
}

std::vector<SettingAnswer> Evaluation::answer(const std::vector<EngineGroup>& groups,
                                              const EvalJob& job, Progress& bar) const try {
  // Show progress within prompts that take long.
  const auto start = base::Clock::now();
  bar.restart();
  constexpr double patience = 3;  // seconds
  const ProgressCallback progress = [&](std::string_view what, std::int64_t done,
                                        std::int64_t total) {
    if (m_host || base::seconds_since(start) > patience) {
      show(bar, what, done, total, "tokens");
    }
  };
  ComparisonOptions options;
  options.max_new_tokens = job.tokens.new_tokens;
  options.stop_ids = m_stop_ids;
  options.max_tokens = m_limit;
  options.sampling = m_options.sampling;
  options.tries = m_options.tries;
  options.continuation = job.tokens.continuation;
  std::vector<SettingAnswer> answers(m_settings.size());
  for (const EngineGroup& group : groups) {
    if (job.has_new_context) group.comparison->prefill(job.tokens.context, progress);
    auto found = group.comparison->answer(job.tokens.question, options, progress);
    for (std::size_t i = 0; i < found.size(); ++i) answers[group.settings[i]] = std::move(found[i]);
  }
  return answers;
} catch (const AgreedError& error) {
  throw AgreedError(fmt::format("{}: line {}: {}", m_files.at(static_cast<std::size_t>(job.file)),
                                job.line, error.what()));
}

void Evaluation::record(const EvalPrompt& prompt, const std::vector<SettingAnswer>& answers) {
  std::vector<EvalRecord> records;
  std::vector<std::string> lines;
  for (std::size_t i = 0; i < m_settings.size(); ++i) {
    records.push_back(record_of(prompt, m_settings[i], answers.at(i), *m_tokenizer));
    lines.push_back(records.back().to_json_line());
  }
  m_folder->append(lines);
  for (const EvalRecord& record : records) m_summary->add(record);
}

int Evaluation::answer_all() {
  check_memory_of_ranks();
  Progress bar(m_talks, m_options.progress),
      within(m_talks, m_options.progress);  // of all prompts; of one prompt
  const ProgressCallback progress = [&](std::string_view what, std::int64_t done,
                                        std::int64_t total) {
    show(bar, what, done, total, what == "load" ? "" : "tokens");
  };
  const std::vector<EngineGroup> groups = make_groups(progress);

  const auto waiting = queues();
  const bool is_by_prompt = m_options.parallel == "prompts";
  const auto total = static_cast<std::int64_t>(m_prompts.prompts.size());
  auto done = static_cast<std::int64_t>(total - static_cast<std::int64_t>(m_left.size()));
  show(bar, "eval", done, total, "prompts");
  int signal = 0;
  for (std::int64_t round = 0; round < m_rounds; ++round) {
    signal = static_cast<int>(m_comm.all_reduce_max(std::int64_t{caught_signal}));
    if (signal != 0) break;
    std::vector<EvalJob> jobs;
    if (m_comm.is_root()) jobs = jobs_of(round, waiting);
    parallel::broadcast(m_comm, 0, jobs);

    std::vector<std::vector<SettingAnswer>> answers(jobs.size());  // of each worker
    if (is_by_prompt) {
      const EvalJob& own = jobs[static_cast<std::size_t>(m_comm.rank())];
      std::vector<SettingAnswer> found;
      on_workers([&] {
        if (own.prompt >= 0) found = answer(groups, own, within);
      });
      answers = parallel::all_gather(m_comm, found);
    } else {
      answers[0] = answer(groups, jobs[0], within);
    }
    m_comm.agree_on_root([&] {
      for (std::size_t i = 0; i < jobs.size(); ++i) {
        if (jobs[i].prompt < 0) continue;
        record(m_prompts.prompts[static_cast<std::size_t>(jobs[i].prompt)], answers[i]);
        within.clear();
        show(bar, "eval", ++done, total, "prompts");
      }
    });
  }
  within.clear();
  bar.clear();
  return signal;
}

ordered_json Evaluation::write_summary() const {
  const fs::path folder = m_folder->folder();
  ordered_json summary = {{"format", "kvzap.evaluation_summary"},
                          {"format_version", 1},
                          {"version", m_version},
                          {"model", description().at("model")},
                          {"tasks", m_prompts.files},
                          {"left_out", m_prompts.left_out.size()}};
  summary.update(m_summary->rows());
  files::write_text(folder / "summary.json", files::json_lines(summary));
  files::write_text(folder / "summary.csv", m_summary->csv());
  return summary;
}

void Evaluation::finish(int signal) const {
  const ordered_json summary = write_summary();
  if (!m_options.json.empty()) {
    write_whole(m_options.json, files::json_lines(summary));
  }
  if (m_options.json != "-" && !m_host) fmt::print("{}", m_summary->table());
  flush_stdout();
  if (signal != 0 && m_talks) {
    say("kvzap: stopped by signal {}: {} has {} of {} prompts; the same command continues\n",
        signal, m_options.output, m_summary->prompts(), m_prompts.prompts.size());
  }
}

}  // namespace

int evaluate(const EvalOptions& given, const Communicator& comm, const std::string& version,
             const EvalHost* host) {
  EvalOptions options = given;
  comm.agree([&] { resolve_pruning(options); });
  resolve_window(options.pruning, comm, comm.is_root() && !options.quiet && !host);
  return Evaluation(options, comm, version, host).run();
}

}  // namespace kvzap::driver
