#include "commands/run/run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/snapshot.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <limits>
#include <utility>

#include "base/stopwatch.hpp"
#include "commands/files/dump.hpp"
#include "commands/run/prompt.hpp"
#include "commands/run/recorded_options.hpp"
#include "commands/run/report.hpp"
#include "commands/run/run_plan.hpp"
#include "commands/run/snapshots.hpp"
#include "commands/support/generator_setup.hpp"
#include "commands/support/model_loading.hpp"
#include "commands/support/policy_setup.hpp"
#include "commands/support/setup.hpp"
#include "console/console.hpp"
#include "console/progress.hpp"
#include "console/signals.hpp"
#include "files/counted.hpp"
#include "files/json_file.hpp"
#include "files/temporary_file.hpp"
#include "options/policy_options.hpp"
#include "parallel/message.hpp"

namespace kvzap {

template <class Visit>
void list_fields(Traffic& traffic, Visit& visit) {
  visit("calls", traffic.calls);
  visit("bytes", traffic.bytes);
  visit("seconds", traffic.seconds);
}

}  // namespace kvzap

namespace kvzap::driver {
namespace {

using base::Clock;
using base::seconds_since;

/// One run, from its options to its report.
class Run {
 public:
  Run(const RunOptions& options, const RunDescription& description,
      std::unique_ptr<session::Recorded> resumed, const Communicator& comm, const Talk& talk)
      : m_options(options),
        m_recorded(description.recorded),
        m_resumed(std::move(resumed)),
        m_comm(comm),
        m_talk(talk),
        m_talks(comm.is_root() && !options.quiet),
        m_bar(m_talks, options.progress) {
    m_report.version = description.version;
    m_report.revision = description.revision;
    m_report.flags = description.flags;
    m_report.ranks = comm.size();
  }

  /// Returns the exit status.
  int operator()();

 private:
  const ModelConfig& config() const { return m_setup->config; }
  const Tokenizer* tokenizer() const { return m_tokenizer ? &*m_tokenizer : nullptr; }
  bool is_after_question() const {
    return m_report.cache_options.pruning.moment == PruneMoment::question;
  }
  void warn(const std::string& what) const {
    if (m_talks) say("kvzap: warning: {}\n", what);
  }

  void check_options();
  void check_outputs() const;
  void take_prompt();
  void set_up_ring(std::int64_t longest);
  void choose_kv_type();
  void set_up_policy();
  void check_memory_of(std::int64_t tokens) const;
  void load();
  void set_up_conversation();
  void go_on(bool reusable);
  void run_context();
  void set_questions();
  std::vector<Quantiles> score_quantiles() const;
  bool prints() const { return m_comm.is_root() && m_options.json != "-"; }
  void print(const std::string& text) const {
    if (prints()) print_now(text);
  }
  void note_stop(int signal);
  void stop_if_asked() const;
  void begin_answer(std::size_t question) const;
  void tell_again(std::size_t question) const;
  void write_due();
  void answer(std::size_t question);
  void answer_all();
  void talk_on();
  void write_dump();
  void note_conversation();
  void note_flags();
  void tell();

  RunOptions m_options;
  std::string m_recorded;
  std::unique_ptr<session::Recorded> m_resumed;
  Communicator m_comm;
  const Talk& m_talk;
  bool m_talks;
  Progress m_bar;
  RunReport m_report;

  std::optional<ModelSetup> m_setup;
  std::optional<Tokenizer> m_tokenizer;  // on rank 0, unless all input and output is token ids
  GenerationConfig m_rules;
  std::vector<TokenId> m_stop_ids;
  std::int64_t m_limit = 0;
  Prompt m_prompt;
  bool m_goes_on = false;  // whether the run continues with the questions of the earlier run
  Texts m_texts;
  ProgressCallback m_progress;
  std::unique_ptr<Generator> m_generator;
  std::optional<session::Conversation> m_conversation;
  std::optional<Dump> m_dump;
  std::optional<Snapshots> m_snapshots;
  bool m_is_snapshot_due = false;
};

// 1. Checks before the work starts.

void Run::check_options() {
  RunOptions& options = m_options;
  agree_on_usage(m_comm, [&] { as_usage([&] { validate(options, !m_talk); }); });
  if (m_resumed && m_resumed->state.looked_up && options.pruning.looks_up_threshold() &&
      options.pruning.prunes()) {
    // A resumed run keeps the threshold with which it began.
    m_report.looked_up = m_resumed->state.looked_up;
    options.pruning.amount = {};
    options.pruning.threshold(m_report.looked_up->threshold);
  } else if (!options.dry_run) {
    m_report.looked_up = resolve_threshold(options, m_talks, m_comm);
  }
  agree_on_usage(m_comm, [&] {
    m_report.cache_options.pruning = options.pruning;
    m_report.cache_options.trim = options.trim;
    m_report.cache_options.page_rows = options.page_rows;
    m_report.cache_options.balance = options.balance;
    m_report.cache_options.read_pages = read_pages(options.read_pages);
    m_setup =
        set_up_model(options.model, options.layers, options.placement, m_comm.size(), options.rope);
    m_limit = context_limit(options.max_context, config(), options.random_weights.has_value());
    if (options.new_tokens == until_end) {
      require(m_limit > 0, "-n -1 needs -c with --random-weights: the context has no other end");
      options.new_tokens = m_limit;
    }
    const bool has_prompt = options.prompt || !options.files.empty() || m_resumed;
    check_parts(options.model, !options.random_weights && !options.dry_run,
                has_prompt && !options.token_ids);
    m_rules = rules_of_answers(options.model, config().vocab_size, options.sampling_flags);
    options.sampling = sampling_in_force(options.sampling, options.sampling_flags, m_rules);
    if (!options.ignore_eos) m_stop_ids = m_rules.stop_ids;
  });
  m_comm.agree_on_root([&] {
    const bool has_prompt = options.prompt || !options.files.empty() || m_resumed;
    if (has_prompt && !options.token_ids) m_tokenizer = Tokenizer::load(options.model);
    check_writable(options.json);
    options.sampling.grammar =
        grammar_of(options.form, tokenizer(), config().vocab_size, m_stop_ids);
  });
  m_report.model = config();
  m_report.all_layers = m_setup->all_layers;
  if (m_comm.is_root()) {
    print_notes(*m_setup, m_talks);
    print_rules(m_rules, options.sampling_flags, m_talks);
  }
}

void Run::check_outputs() const {
  if (!m_options.dump.empty()) {
    m_comm.agree_on_root([&] {
      for (const auto& note : files::check_file_writable(m_options.dump, "--dump")) {
        warn(note);
      }
    });
  }
  if (!m_options.snapshot.empty()) {
    for (const std::string& note : check_snapshot_writable(m_options.snapshot, m_comm)) warn(note);
  }
}

void Run::take_prompt() {
  // A conversation may begin with the chat template alone.
  m_prompt = share_prompt(m_options, tokenizer(), config(), m_limit, m_comm, m_resumed.get(),
                          static_cast<bool>(m_talk));
  m_goes_on = m_resumed && m_options.questions.empty() && m_options.append.empty();
  m_report.context_tokens = static_cast<std::int64_t>(m_prompt.context.size());
}

/// Sets the length of the ring. A resumed run must have the ring of the run that wrote the
/// snapshot.
void Run::set_up_ring(std::int64_t longest) {
  int& window = m_report.cache_options.pruning.window;
  if (!m_resumed) {
    if (!m_options.snapshot.empty() || m_talk) {
      longest = m_options.random_weights ? std::numeric_limits<std::int64_t>::max()
                                         : std::max(longest, config().longest_context());
    }
    window = ring_rows(window, longest);
    return;
  }
  const std::int64_t ring = m_resumed->reader.header().window;
  m_comm.agree([&] {
    if (ring == window || (ring > 0 && ring < window && longest <= ring)) return;
    throw Error(
        fmt::format("snapshot {}: its window is {}; expected {}, that of its option --window",
                    m_options.resume, ring, window));
  });
  window = static_cast<int>(ring);
}

void Run::choose_kv_type() {
  if (m_options.kv_type == kv_type_auto) {
    const std::int64_t tokens = pruned_tokens(m_prompt, m_options.pruning);
    m_options.kv_type = resolved_kv_type(m_options, config(), tokens);
    if (m_talks) {
      say("kvzap: --kv-type auto: {} for {} in {}\n", m_options.kv_type,
          files::counted(tokens, "token"), human_bytes(*m_options.pruning.amount.kv_bytes));
    }
  }
  m_report.cache_options.page_format = page_format(m_options.kv_type, m_options.dtype);
}

void Run::set_up_policy() {
  choose_kv_type();
  std::int64_t longest = 0;
  for (const auto& question : m_prompt.questions) {
    const auto tokens = static_cast<std::int64_t>(m_prompt.context.size() + question.size());
    longest = std::max(longest, tokens + m_options.new_tokens);
  }
  set_up_ring(longest);
  const auto repeat =
      share_repeat_prompt(m_options, *m_setup, tokenizer(), m_prompt.context, m_comm);
  agree_on_usage(m_comm, [&] {
    // Loads the policy before the weights: it is small, and its errors should appear before minutes
    // of loading.
    CacheOptions& cache = m_report.cache_options;
    cache.policy = load_policy(m_options, repeat, *m_setup, m_comm).policy;
    if (cache.policy) {
      check_budget(m_options, *cache.policy, config(), m_report.context_tokens, cache.page_format);
    }
    m_report.is_full_at_first = cache.is_full_at_first();
  });
  const CacheOptions& cache = m_report.cache_options;
  const bool repeats = cache.policy && cache.policy->info->repeats_context;
  const std::int64_t repeat_tokens =
      repeats ? longest_repeat(m_report.context_tokens, cache.policy->repeat) : 0;
  if (repeats && !m_options.random_weights &&
      m_report.context_tokens + repeat_tokens > config().longest_context()) {
    warn(
        fmt::format("the repeat of the context ends at position {}, and the model's {} is {}: "
                    "its scores there may mean little",
                    m_report.context_tokens + repeat_tokens, name_of_longest(config()),
                    config().longest_context()));
  }
  m_texts = load_policy_texts(m_options, cache.policy.get(), *m_setup, tokenizer(), m_comm);
  // Rows of a repeat temporarily follow those of the context.
  check_memory_of(m_report.context_tokens + repeat_tokens);
  if (cache.prunes()) m_report.policy = m_options.pruning.policy_text(flag_names());
  if (cache.scorer() && !m_options.pruning.surrogate.empty()) {
    m_report.surrogate_kind = cache.scorer()->kind();
  }
}

void Run::check_memory_of(std::int64_t tokens) const {
  const int ranks_on_node = m_comm.ranks_on_node();
  m_comm.agree([&] {
    const MemoryPlan planned = plan_of(m_options, config(), tokens, m_comm.size(), {});
    check_memory(least_bytes(planned, !m_report.is_full_at_first), ranks_on_node,
                 "weights and cache (--dry-run prints the plan)");
    std::size_t most = 0;
    for (const auto& text : m_texts) most = std::max(most, text.size());
    if (most == 0) return;
    const MemoryPlan of_texts =
        plan_of(m_options, config(), static_cast<std::int64_t>(most), m_comm.size(), {});
    check_memory(least_bytes(of_texts, true), ranks_on_node,
                 fmt::format("weights and the longest of the policy's texts, {}",
                             files::counted(most, "token")));
  });
}

// 2. Loading: this rank's share of the weights, and the texts from which the policy learns.

void Run::load() {
  m_progress = [this](std::string_view what, std::int64_t done, std::int64_t total) {
    m_bar.update(what, done, total, what == "load" ? "" : "tokens");
    m_report.stopped_in = what == "prefill" ? "context" : what;
    m_report.stopped_after = done;
    m_report.stopped_of = total;
    // With a snapshot, the context first runs to its end or to the end of a chunk.
    const bool is_to_be_kept = !m_options.snapshot.empty() && what != "load" && what != "texts";
    if (!is_to_be_kept) stop_here_if_asked();
  };
  m_generator = make_generator(m_options, m_texts, *m_setup, m_comm, m_progress, m_report);
  warn_of_lookup(m_generator->engine(), m_options.lookup, m_talks);
}

void Run::set_up_conversation() {
  session::ConversationState state;
  if (m_resumed) state = m_resumed->state;
  if (m_options.system) state.system = m_options.system;
  if (!m_options.append.empty()) state.context.reset();
  state.dtype = dtype_from_name(m_options.dtype);
  state.looked_up = m_report.looked_up;
  const std::string policy = state.policy;
  m_conversation.emplace(
      *m_generator, session::Conversation::Texts{tokenizer(), m_comm.is_root() && !m_tokenizer},
      std::move(state));
  m_snapshots.emplace(m_options, *m_conversation, m_comm, m_bar, m_report.snapshots);
  if (m_options.snapshot.empty() && !m_talk) return;
  m_comm.agree_on_root([&] {
    SnapshotInfo info;
    info.model = m_options.model;
    info.kvzap_version = m_report.version;
    info.options = m_recorded;
    const bool is_named = m_resumed && !m_resumed->is_older();
    const ModelHashes hashes =
        m_resumed ? m_resumed->hashes : hashes_of_model(m_options.model, !m_options.random_weights);
    m_conversation->describe(
        std::move(info),
        is_named ? policy : session::identity_of_policy(m_options.pruning, flag_names()), hashes,
        m_options.pruning, flag_names());
  });
}

// 3. The context: run and pruned, or read from a snapshot.

/// Restores the earlier run's work from the snapshot.
void Run::go_on(bool reusable) {
  const SnapshotHeader& header = m_resumed->reader.header();
  ResumedFrom from;
  from.file = m_options.resume;
  from.kvzap_version = header.info.kvzap_version;
  from.bytes = header.file_bytes;
  from.tokens = header.tokens;
  const auto note = note_of_types(m_options.resume, header, m_report.cache_options.page_format,
                                  dtype_from_name(m_options.dtype));
  if (m_talks && note) say("kvzap: note: {}\n", *note);
  const auto start = Clock::now();
  m_conversation->resume(m_resumed->reader, m_conversation->state(), reusable);
  from.seconds = seconds_since(start);
  from.context_tokens = m_generator->context_run();
  if (m_generator->is_answering()) {
    from.answer_tokens = static_cast<std::int64_t>(m_generator->answered().size());
  }
  m_report.resumed = std::move(from);
  m_resumed.reset();  // the file may be replaced from now on
  const auto known = static_cast<std::ptrdiff_t>(m_generator->context().size());
  if (m_options.append.empty()) return;
  m_comm.agree([&] {
    try {
      m_generator->append_context({m_prompt.context.begin() + known, m_prompt.context.end()});
    } catch (const Error& error) {
      throw Error(fmt::format("--append {}: {}", m_options.append, error.what()));
    }
  });
}

/// Replaces the questions of an earlier run, unless it continues with them.
void Run::set_questions() {
  if (m_goes_on && !m_conversation->state().questions.empty()) return;
  m_conversation->forget_questions();
  for (std::size_t i = 0; i < m_prompt.questions.size(); ++i) {
    m_conversation->add_question(m_prompt.texts[i], m_prompt.questions[i]);
  }
}

void Run::run_context() {
  // After an interrupted answer, other questions about the context may follow. (With --decode-every
  // this would take a second cache even for a single question.)
  const bool is_kept = m_snapshots->is_on() && m_options.pruning.decode.every == 0;
  const bool reusable = !m_talk && (m_prompt.questions.size() > 1 || is_kept);
  if (m_resumed) go_on(reusable);
  set_questions();
  const std::int64_t before = m_report.resumed ? m_report.resumed->context_tokens : 0;
  std::int64_t done = before;
  const auto after_chunk = [&] {
    if (!m_snapshots->is_on()) stop_if_asked();
    // The snapshot at the end of the context is written later, with the complete run state.
    if (m_generator->is_context_done()) return m_snapshots->finish();
    m_snapshots->after_step(m_generator->context_run() - done);
    done = m_generator->context_run();
  };
  const bool is_from_snapshot = m_conversation->state().context.has_value();
  const auto start = Clock::now();
  const auto note = [&] {
    m_bar.clear();
    if (is_from_snapshot) {
      m_report.context = *m_conversation->state().context;
    } else if (!is_after_question()) {
      m_report.prefill_seconds = seconds_since(start);
      m_report.prefill_tokens = m_generator->context_run() - before;
      m_report.context = m_generator->report();
    }
  };
  try {
    if (m_report.resumed) {
      m_generator->prefill_rest(m_progress, after_chunk);
    } else {
      m_generator->prefill(m_prompt.context, reusable, m_progress, after_chunk);
    }
  } catch (const Interrupted&) {
    note();
    throw;
  }
  note();
  if (!is_after_question() && !is_from_snapshot) {
    m_report.context_scores = score_quantiles();
    m_conversation->note_context(m_report.context);
  }
  if (m_dump) m_dump->take_prefill(*m_generator);
}

// 4. Questions: each starts from the same pruned context. Tokens are printed as they are generated.

/// Prints a heading if there are several answers. A single answer is printed alone, for scripts.
void Run::begin_answer(std::size_t question) const {
  if (!prints() || m_prompt.questions.size() < 2) return;
  print(fmt::format("{}{}\n", question > 0 ? "\n" : "",
                    answer_heading(question + 1, m_prompt.texts[question])));
}

/// Prints an answer of the earlier run.
void Run::tell_again(std::size_t question) const {
  if (!prints()) return;
  begin_answer(question);
  print(m_conversation->answers()[question].text + "\n");
}

/// Returns the quantiles of the current rows' scores for the report. Collective.
std::vector<Quantiles> Run::score_quantiles() const {
  if (m_options.json.empty() || !m_report.cache_options.prunes()) return {};
  std::vector<Quantiles> layers;
  for (int layer = 0; layer < config().num_hidden_layers; ++layer) {
    std::vector<float> scores;
    m_comm.agree([&] { scores = m_generator->scores_of_rank(layer); });
    std::vector<float> of_all_ranks = m_comm.gather(scores.data(), scores.size(), 0);
    if (m_comm.is_root()) layers.push_back(quantiles_of(of_all_ranks));
  }
  return layers;
}

void Run::answer(std::size_t question) {
  const std::vector<TokenId>& ids = m_prompt.questions[question];
  begin_answer(question);
  // tokens that the first new token adds to the cache
  auto tokens = m_conversation->goes_on() ? 0 : static_cast<std::int64_t>(ids.size());
  AnswerOptions options;
  options.max_new_tokens = m_options.new_tokens;
  options.stop_ids = m_stop_ids;
  options.max_tokens = m_limit;
  options.sampling = m_options.sampling;
  options.lookup = m_options.lookup;
  options.progress = m_progress;
  options.on_token = [&](TokenId) {
    m_bar.clear();
    try {
      if (!m_snapshots->is_on()) stop_if_asked();
      write_due();
      m_snapshots->after_step(1 + std::exchange(tokens, 0));
    } catch (const Interrupted& interrupted) {
      throw session::Stopped{interrupted.signal};
    }
    // The report of the cache at an answer's end must not include memory that a snapshot holds.
    if (m_generator->is_answer_complete()) m_snapshots->finish();
  };
  if (m_dump) m_dump->begin_answer(ids, *m_generator, options);
  const int signal = m_conversation->answer(
      options,
      [this](const std::string& piece) {
        m_bar.clear();
        print(piece);
      },
      m_options.form.stops);
  print("\n");
  if (signal != 0) {
    m_report.unfinished = m_conversation->unfinished();
    m_report.stopped_in = "answer";
    m_report.stopped_after = static_cast<std::int64_t>(m_report.unfinished->answer.tokens.size());
    m_report.stopped_of = m_options.new_tokens;
    throw Interrupted{signal};
  }
  write_due();  // if there was no token
  const std::vector<AnsweredQuestion>& answers = m_conversation->answers();
  if (m_dump) m_dump->end_answer(*m_generator, answers.back().answer);
  m_report.answer_scores.resize(answers.size() - 1);
  m_report.answer_scores.push_back(score_quantiles());
}

void Run::write_due() {
  if (std::exchange(m_is_snapshot_due, false)) m_snapshots->write();
}

void Run::answer_all() {
  m_is_snapshot_due = m_snapshots->is_on();
  // The answer to a question that is no longer asked is discarded.
  const bool has_other_answer = !m_goes_on && !m_generator->answered().empty();
  if (!is_after_question() && !has_other_answer) {
    write_due();
    m_snapshots->after_step(0);
  }
  const std::size_t before = m_conversation->answers().size();
  for (std::size_t i = 0; i < before; ++i) tell_again(i);
  for (std::size_t i = before; i < m_prompt.questions.size(); ++i) answer(i);
  m_snapshots->finish();
}

/// Runs the conversation in place of the questions.
void Run::talk_on() {
  OpenRun open{m_options, *m_conversation, tokenizer(), m_prompt.context, m_stop_ids,
               m_limit,   m_report,        m_bar,       m_progress,       m_comm};
  m_talk(open);
}

// 5. The report.

/// Stops after a signal. Also stops if standard output has failed and there is no other output,
/// because then nobody can read the answer.
void Run::stop_if_asked() const {
  const bool is_lost =
      prints() && std::ferror(stdout) != 0 && m_options.json.empty() && m_options.dump.empty();
  const int wish = caught_signal != 0 ? static_cast<int>(caught_signal) : is_lost ? SIGPIPE : 0;
  const int signal = static_cast<int>(m_comm.all_reduce_max(std::int64_t{wish}));
  if (signal != 0) throw Interrupted{signal};
}

void Run::note_stop(int signal) {
  m_bar.clear();
  m_report.signal = signal;
}

void Run::write_dump() {
  m_dump->write(m_options.dump, {{"format", "kvzap.dump"},
                                 {"format_version", "1"},
                                 {"kvzap", m_report.version},
                                 {"model", m_options.model},
                                 {"dtype", m_options.dtype},
                                 {"policy", m_report.policy.empty() ? "none" : m_report.policy}});
}

/// Adds the conversation's questions and answers to the report.
void Run::note_conversation() {
  session::ConversationState state;
  if (m_conversation) {
    state = m_conversation->state();
  } else if (m_goes_on) {
    state = m_resumed->state;  // the run was stopped while it loaded
  }
  m_report.answers.insert(m_report.answers.end(), state.answers.begin(), state.answers.end());
  m_report.question_ids.insert(m_report.question_ids.end(), state.questions.begin(),
                               state.questions.end());
  if (is_after_question() && state.context) m_report.context = *state.context;
}

/// Adds the options that were computed.
void Run::note_flags() {
  auto flags = files::parse_own_json(m_report.flags);
  if (m_report.looked_up) {
    flags["threshold"] = number_json(m_report.looked_up->threshold);
    // The two options exclude each other.
    flags["evict-ratio"] = nullptr;
  }
  if (m_limit > 0) flags["ctx-size"] = m_limit;
  if (flags["kv-type"] == kv_type_auto) flags["kv-type"] = m_options.kv_type;
  flags["layers"] = config().num_hidden_layers;
  m_report.flags = flags.dump();
  if (m_options.json_token_ids) m_report.context_ids = m_prompt.context;
}

void Run::tell() {
  note_conversation();
  note_flags();
  m_report.peak_rss_bytes = parallel::all_gather(m_comm, peak_rss_bytes());
  m_report.traffic = parallel::all_gather(m_comm, Communicator::traffic());
  m_comm.agree_on_root([&] {
    std::fflush(stdout);  // the answer comes first
    if (m_talks && !m_talk) {
      say("{}", to_text(m_report, m_options));
      // flush_stdout reports lost output.
      if (m_report.signal != 0 && m_report.signal != SIGPIPE)
        say("kvzap: {}\n", stop_text(m_report, m_options));
    }
    if (!m_options.json.empty()) {
      write_whole(m_options.json, files::json_lines(to_json(m_report, m_options)));
    }
    if (m_report.signal != SIGHUP) flush_stdout();  // fails if the terminal was closed
  });
}

int Run::operator()() {
  check_options();
  // Set first, because memory is planned and allocated for each thread.
  use_threads(m_options.threads, m_comm, m_talks);
  m_report.machine = describe_machine();
  if (m_options.dry_run) {
    dry_run(m_options, *m_setup, tokenizer(), m_limit, m_comm);
    return 0;
  }
  check_outputs();
  take_prompt();
  // Signals are recorded from here on, when no more input is requested, to the end. A second signal
  // of timeout(1) must not cut off the report.
  const SignalWatch watch;
  try {
    set_up_policy();
    stop_if_asked();
    load();
    stop_if_asked();
    set_up_conversation();
    if (!m_options.dump.empty()) {
      m_dump.emplace(m_prompt.context, m_prompt.questions.size(), m_report.cache_options,
                     m_setup->partition, m_comm);
      m_generator->set_observer(&*m_dump);
    }
    run_context();
    m_talk ? talk_on() : answer_all();
  } catch (const Interrupted& interrupted) {
    note_stop(interrupted.signal);
  } catch (const Error& error) {
    if (!is_stop(error)) throw;
    note_stop(static_cast<int>(m_comm.all_reduce_max(std::int64_t{caught_signal})));
  }
  if (m_dump && m_report.signal == 0) write_dump();
  tell();
  constexpr int by_signal = 128;
  return m_report.signal == 0 ? 0 : by_signal + m_report.signal;
}

}  // namespace

int run(const RunOptions& options, const RunDescription& description,
        std::unique_ptr<session::Recorded> resumed, const Communicator& comm, const Talk& talk) {
  return Run(options, description, std::move(resumed), comm, talk)();
}

}  // namespace kvzap::driver
