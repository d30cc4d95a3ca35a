#include "commands/chat.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <kvzap/engine/generate.hpp>
#include <kvzap/engine/policies.hpp>
#include <kvzap/model/chat_template.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "base/quote.hpp"
#include "base/stopwatch.hpp"
#include "commands/chat_input.hpp"
#include "commands/policy_setup.hpp"
#include "commands/prompt.hpp"
#include "commands/recorded_options.hpp"
#include "commands/report.hpp"
#include "commands/run.hpp"
#include "commands/snapshots.hpp"
#include "console/console.hpp"
#include "console/signals.hpp"
#include "options/one_file.hpp"
#include "options/policy_options.hpp"
#include "parallel/meet_asleep.hpp"

namespace kvzap::driver {
namespace {

using base::Clock;
using base::seconds_since;

const char* const help_text =
    "/stats      tokens, kept rows, evict ratio, bytes, tokens/s\n"
    "/save FILE  write the conversation to an HDF5 file\n"
    "/load FILE  continue such a file instead of this conversation\n"
    "/reset      start again from the context\n"
    "/help       print this list\n"
    "/exit       leave, as Ctrl-D does\n"
    "A line is a message. After a \\ at its end, the message continues in the next line.\n"
    "All text between \"\"\" and \"\"\" is one message. Ctrl-C ends an answer; twice leaves.\n";

/// The next action that the user requests.
enum class Wish : std::int64_t { say, stats, save, load, reset, help, unknown, leave, stop };

struct Command {
  Wish wish = Wish::leave;
  std::string text;
};

/// Reads a line that is no message: a command and perhaps a file.
Command command_of(const std::string& line) {
  const std::size_t end = std::min(line.find_first_of(" \t"), line.size());
  const std::size_t begin = line.find_first_not_of(" \t", end);
  Command command;
  if (begin != std::string::npos) {
    command.text = line.substr(begin, line.find_last_not_of(" \t") + 1 - begin);
  }
  const std::string name = line.substr(0, end);
  const std::pair<const char*, Wish> wishes[] = {{"/stats", Wish::stats}, {"/save", Wish::save},
                                                 {"/load", Wish::load},   {"/reset", Wish::reset},
                                                 {"/help", Wish::help},   {"/exit", Wish::leave},
                                                 {"/quit", Wish::leave},  {"/bye", Wish::leave}};
  for (const auto& [word, wish] : wishes) {
    if (name != word) continue;
    command.wish = wish;
    return command;
  }
  return {Wish::unknown, name};
}

/// Returns whether the text can be a file name. The system would cut it at a NUL.
bool is_file_name(const std::string& text) { return text.find('\0') == std::string::npos; }

/// A conversation from its first message to its end. All ranks take the same steps. Rank 0 reads,
/// prints, and sends commands to the other ranks.
class Conversation {
 public:
  Conversation(OpenRun& run, std::string recorded)
      : m_run(run),
        m_comm(run.comm),
        m_recorded(std::move(recorded)),
        m_input(STDIN_FILENO),
        m_prompts(m_comm.is_root() && !run.options.quiet && is_typed()) {}

  void operator()();

 private:
  /// Returns whether a person types the input: at this process's terminal, or at that of mpirun,
  /// which forwards standard input.
  static bool is_typed() {
    return isatty(STDIN_FILENO) != 0 || (isatty(STDERR_FILENO) == 0 && Terminal(false).exists());
  }
  bool prints() const { return m_comm.is_root() && m_run.options.json != "-"; }
  template <class... Arguments>
  void tell(fmt::format_string<Arguments...> format, Arguments&&... arguments) const {
    if (!m_comm.is_root()) return;
    m_run.bar.clear();
    say(format, std::forward<Arguments>(arguments)...);
  }

  void prepare();
  Command read();
  Command next();
  void answer(const std::string& text);
  void run_answer(AnsweredQuestion& turn, const std::vector<TokenId>& ids);
  void end_turn();
  void note(AnsweredQuestion turn, const std::vector<TokenId>& ids);
  void stats();
  void save(const std::string& file);
  void load(const std::string& file);
  void reset();
  void adopt(RunState state);
  std::int64_t tokens() const {
    return m_run.generator.engine().tokens(m_run.generator.sequence());
  }
  int agreed_signal() const;
  void forget_signals() const { caught_signal = 0; }
  [[noreturn]] void leave(int signal) const { throw Interrupted{signal}; }

  OpenRun& m_run;
  const Communicator& m_comm;
  std::string m_recorded;
  LineReader m_input;
  MessageBuilder m_builder;
  bool m_prompts;
  int m_interrupts = 0;  // number of Ctrl-C since the last message

  ChatTemplate::Parts m_parts;     // on rank 0
  std::vector<TokenId> m_suffix;   // after a message of the user
  std::vector<TokenId> m_between;  // between an answer and the next message
  std::size_t m_earlier = 0;       // answers of earlier conversations
};

/// Returns the signal that ends the conversation, on every rank: the largest signal of any rank.
int Conversation::agreed_signal() const {
  // If standard output has failed and there is no other output, the answer is lost, and the
  // conversation ends.
  const bool is_lost = prints() && std::ferror(stdout) != 0 && m_run.options.json.empty();
  const int wish = caught_signal != 0 ? static_cast<int>(caught_signal) : is_lost ? SIGPIPE : 0;
  return static_cast<int>(m_comm.all_reduce_max(std::int64_t{wish}));
}

void Conversation::prepare() {
  m_comm.agree_on_root([&] {
    const ChatTemplate chat_template = ChatTemplate::detect(m_run.options.model);
    m_parts = *session::PromptForm::of_template(chat_template, m_run.options.thinking == "on",
                                                m_run.options.system)
                   .parts;
    m_suffix = m_run.tokenizer->encode(m_parts.suffix);
    m_between = m_run.tokenizer->encode(chat_template.between_turns());
  });
  m_comm.broadcast(m_suffix, 0);
  m_comm.broadcast(m_between, 0);
  adopt(m_run.state);
}

/// Continues with the questions and answers of a snapshot's run. The generator has its cache.
void Conversation::adopt(RunState state) {
  const std::vector<AnsweredQuestion>& answers = m_run.report.answers;
  const std::size_t count = answers.size() - m_earlier;
  Generator& generator = m_run.generator;
  const bool is_open = !generator.question().empty() || !generator.answered().empty();
  std::string text;
  if (count < state.texts.size()) text = state.texts[count];
  state.texts.resize(std::min(count, state.texts.size()));
  state.questions.resize(state.texts.size());
  state.answers.clear();
  auto& ids = m_run.report.question_ids;
  ids.resize(m_earlier);
  ids.insert(ids.end(), state.questions.begin(), state.questions.end());
  m_run.state = std::move(state);
  if (!is_open) return;
  // An unfinished answer ends here.
  if (generator.is_answering()) {
    AnsweredQuestion turn;
    turn.question = text;
    turn.is_from_snapshot = true;
    turn.is_interrupted = true;
    turn.answer.tokens = generator.answered();
    turn.answer.cache = generator.report();
    turn.answer.question_tokens = static_cast<std::int64_t>(generator.question().size());
    if (m_comm.is_root()) turn.text = m_run.tokenizer->decode(turn.answer.tokens);
    note(std::move(turn), generator.question());
  }
  end_turn();
}

/// Returns the next message or command. On rank 0.
Command Conversation::read() {
  const bool is_terminal = isatty(STDIN_FILENO) != 0;
  m_builder.forget();
  while (true) {
    if (m_prompts) say("{}", m_builder.is_open() ? ". " : "> ");
    std::string line;
    const LineReader::Outcome outcome = m_input.read(line);
    if (outcome == LineReader::Outcome::signal) {
      const int signal = caught_signal;
      if (signal != SIGINT || ++m_interrupts > 1) return {Wish::stop, std::to_string(signal)};
      forget_signals();
      m_builder.forget();
      if (is_terminal) m_input.forget();
      if (m_prompts) say("\n(Ctrl-C once more, /exit or Ctrl-D leaves)\n");
      continue;
    }
    if (outcome == LineReader::Outcome::end) {
      if (m_prompts) say("\n");
      const std::string rest = m_builder.finish();
      return rest.empty() ? Command{} : Command{Wish::say, rest};
    }
    const bool is_first = !m_builder.is_open();
    const auto message = m_builder.add(line);
    if (!message || message->find_first_not_of(" \t\r\n") == std::string::npos) continue;
    m_interrupts = 0;
    const bool is_command = is_first && !m_builder.is_quoted() && message->front() == '/';
    return is_command ? command_of(*message) : Command{Wish::say, *message};
  }
}

/// Returns the same message or command on every rank.
Command Conversation::next() {
  Command command;
  std::optional<Error> failure;
  if (m_comm.is_root()) {
    try {
      command = read();
    } catch (const Error& error) {
      failure = error;
    }
  }
  parallel::meet_asleep(m_comm);
  m_comm.agree_on_root([&] {
    if (failure) throw Error(*failure);
  });
  std::int64_t sizes[] = {static_cast<std::int64_t>(command.wish),
                          static_cast<std::int64_t>(command.text.size())};
  m_comm.broadcast(sizes, sizeof(sizes), 0);
  command.wish = static_cast<Wish>(sizes[0]);
  command.text.resize(static_cast<std::size_t>(sizes[1]));
  m_comm.broadcast(command.text.data(), command.text.size(), 0);
  // Launchers send Ctrl-C to all ranks. A signal that rank 0 has handled must not end the next
  // answer.
  if (!m_comm.is_root() && command.wish != Wish::stop && caught_signal == SIGINT) forget_signals();
  return command;
}

void Conversation::operator()() {
  prepare();
  if (m_prompts) {
    tell("{} tokens of context; /help lists commands\n", tokens());
  }
  while (true) {
    const Command command = next();
    switch (command.wish) {
      case Wish::say:
        answer(command.text);
        break;
      case Wish::stats:
        stats();
        break;
      case Wish::save:
        save(command.text);
        break;
      case Wish::load:
        load(command.text);
        break;
      case Wish::reset:
        reset();
        break;
      case Wish::help:
        tell("{}", help_text);
        break;
      case Wish::unknown:
        tell(
            "kvzap: {} is no command; /help lists them (a message that begins with / goes "
            "between \"\"\" and \"\"\")\n",
            base::shown_message(command.text));
        break;
      case Wish::stop:
        leave(std::stoi(command.text));
      case Wish::leave:
        if (!m_run.options.quiet) stats();
        return;
    }
  }
}

void Conversation::answer(const std::string& text) {
  std::vector<TokenId> ids;
  try {
    m_comm.agree_on_root([&] {
      const ChatTemplate::Parts message{"", m_parts.suffix, m_parts.trim_content};
      ids = m_run.tokenizer->encode(message.prompt(text));
      const std::int64_t size = static_cast<std::int64_t>(ids.size());
      const std::int64_t after = static_cast<std::int64_t>(m_between.size()) + 1;
      if (m_run.limit > 0 && tokens() + size + after > m_run.limit) {
        throw Error(fmt::format(
            "the context is full: {} tokens of {}, and the message has {}; /reset starts again, "
            "/save FILE keeps the conversation",
            tokens(), m_run.limit, size));
      }
    });
  } catch (const AgreedError& error) {
    tell("kvzap: {}\n", error.what());
    return;
  }
  m_comm.broadcast(ids, 0);
  AnsweredQuestion turn;
  turn.question = text;
  run_answer(turn, ids);
}

/// Streams the answer, and keeps it even if it is interrupted.
void Conversation::run_answer(AnsweredQuestion& turn, const std::vector<TokenId>& ids) {
  Generator& generator = m_run.generator;
  std::optional<Tokenizer::StreamDecoder> decoder;
  if (m_comm.is_root()) decoder.emplace(*m_run.tokenizer);
  const auto emit = [&](const std::string& piece) {
    turn.text += piece;
    if (!prints()) return;
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
  };
  struct Ended {
    int signal;
  };
  AnswerOptions options;
  options.max_new_tokens = m_run.options.new_tokens;
  options.stop_ids = m_run.stop_ids;
  // Leaves space for the last token and the text after it.
  if (m_run.limit > 0) {
    options.max_tokens = m_run.limit - static_cast<std::int64_t>(m_between.size()) - 1;
  }
  options.sampling = m_run.options.sampling;
  options.progress = m_run.progress;
  options.on_token = [&](TokenId token) {
    m_run.bar.clear();
    if (decoder) emit(decoder->append(token));
    const int signal = agreed_signal();
    if (signal != 0) throw Ended{signal};
  };
  const auto start = Clock::now();
  int signal = 0;
  bool has_begun = true;
  try {
    turn.answer = generator.answer(ids, options);
  } catch (const Ended& ended) {
    signal = ended.signal;
    turn.is_interrupted = true;
    turn.answer.tokens = generator.answered();
    turn.answer.question_tokens = static_cast<std::int64_t>(ids.size());
    turn.answer.decode_seconds = seconds_since(start);
    turn.answer.cache = generator.report();
  } catch (const Error& error) {
    if (!is_stop(error)) throw;
    signal = agreed_signal();
    has_begun = false;
  }
  m_run.bar.clear();
  if (decoder) emit(decoder->finish());
  if (prints() && has_begun) std::fwrite("\n", 1, 1, stdout);
  if (prints()) std::fflush(stdout);
  if (has_begun) {
    note(std::move(turn), ids);
    end_turn();
  }
  if (signal == 0) {
    if (m_run.report.answers.back().answer.stop_reason == StopReason::context_full) {
      tell(
          "kvzap: the context is full: {} tokens of {}; /reset starts again, /save FILE keeps the "
          "conversation\n",
          tokens(), m_run.limit);
    }
    return;
  }
  if (signal != SIGINT) leave(signal);
  forget_signals();
  ++m_interrupts;
  tell("(ended by Ctrl-C{}; once more leaves)\n",
       has_begun ? "" : " before it began; the message is taken back");
}

void Conversation::note(AnsweredQuestion turn, const std::vector<TokenId>& ids) {
  m_run.state.texts.push_back(turn.question);
  m_run.state.questions.push_back(ids);
  m_run.report.question_ids.push_back(ids);
  m_run.report.answers.push_back(std::move(turn));
}

/// Makes the answer a part of the context, in which the user's next message has begun. A snapshot
/// holds this state, whenever it is written.
void Conversation::end_turn() {
  Generator& generator = m_run.generator;
  const std::vector<TokenId>& said = generator.answered();
  const auto& stops = m_run.stop_ids;
  // The template ends the answer with its own token, which is usually the same.
  const bool has_end =
      !said.empty() && (said.back() == m_between.front() ||
                        std::find(stops.begin(), stops.end(), said.back()) != stops.end());
  generator.keep_answer(m_between, !has_end);
}

void Conversation::stats() {
  const CacheReport cache = m_run.generator.report();
  if (!m_comm.is_root()) return;
  std::int64_t kept = 0, rows = 0;
  for (const auto& layer : cache.kept) {
    for (const std::int64_t head : layer) {
      kept += head;
      rows += cache.tokens;
    }
  }
  const std::size_t answers = m_run.report.answers.size() - m_earlier;
  std::string text = fmt::format(
      "conversation  {} {}, {} tokens{}\n"
      "kept rows     {} of {}, evict ratio {:.3f}\n"
      "KV cache      {} of {}, allocated {}\n",
      answers, answers == 1 ? "answer" : "answers", cache.tokens,
      m_run.limit > 0 ? fmt::format(" of {}", m_run.limit) : "", kept, rows, cache.evict_ratio(),
      human_bytes(cache.live_bytes), human_bytes(cache.full_bytes),
      human_bytes(cache.allocated_bytes));
  std::int64_t generated = 0;
  double seconds = 0;
  for (std::size_t i = m_earlier; i < m_run.report.answers.size(); ++i) {
    const Answer& answer = m_run.report.answers[i].answer;
    if (answer.decode_seconds <= 0) continue;
    // The first token belongs to the question's step.
    generated += std::max<std::int64_t>(0, static_cast<std::int64_t>(answer.tokens.size()) - 1);
    seconds += answer.decode_seconds;
  }
  if (seconds > 0) {
    text +=
        fmt::format("speed         {:.1f} tokens/s\n", static_cast<double>(generated) / seconds);
  }
  tell("{}", text);
}

void Conversation::save(const std::string& file) {
  if (file.empty()) return tell("kvzap: /save needs a file: /save chat.h5\n");
  if (!is_file_name(file)) return tell("kvzap: error: /save: a file's name has no NUL\n");
  try {
    m_comm.agree_on_root([&] {
      // The report is written last, and would replace the conversation.
      const std::pair<const char*, const std::string&> others[] = {{"--json", m_run.options.json},
                                                                   {"-f", m_run.options.file}};
      for (const auto& [flag, other] : others) {
        if (!other.empty() && name_one_file(file, other)) {
          throw Error(fmt::format("/save {}: {} names the same file", file, flag));
        }
      }
    });
    for (const std::string& warning : check_snapshot_writable(file, m_comm)) {
      tell("kvzap: warning: {}\n", warning);
    }
    RunState state = m_run.state;
    state.context = m_run.generator.report();
    state.answers.assign(m_run.report.answers.begin() + static_cast<std::ptrdiff_t>(m_earlier),
                         m_run.report.answers.end());
    if (state.questions.empty()) {
      state.texts = {""};
      state.questions = {m_suffix};
    }
    SnapshotInfo info = m_run.info;
    if (m_comm.is_root()) info.run_state = to_json_text(state);
    for (const std::string& warning :
         m_run.generator.write_snapshot(file, std::move(info), SnapshotOptions())) {
      tell("kvzap: warning: {}\n", warning);
    }
    tell("kvzap: {} tokens saved in {}\n", tokens(), base::shown_message(file));
  } catch (const AgreedError& error) {
    tell("kvzap: error: {}\n", base::shown_message(error.what()));
  }
}

void Conversation::load(const std::string& file) {
  if (file.empty()) return tell("kvzap: /load needs a file: /load chat.h5\n");
  if (!is_file_name(file)) return tell("kvzap: error: /load: a file's name has no NUL\n");
  try {
    const auto loaded = open_fitting(file, m_recorded, m_run.info, m_run.state,
                                     dtype_from_name(m_run.options.dtype), m_comm);
    m_comm.agree([&] {
      const SnapshotHeader& header = loaded->reader.header();
      const std::int64_t window = m_run.generator.engine().options().pruning.window;
      if (header.window != window) {
        throw Error(
            fmt::format("snapshot {}: its window is {}; expected {}", file, header.window, window));
      }
      if (m_run.limit > 0 && header.tokens > m_run.limit) {
        throw Error(fmt::format("snapshot {}: it has {} tokens; the longest context accepted is {}",
                                file, header.tokens, m_run.limit));
      }
    });
    const auto note =
        note_of_types(file, loaded->reader.header(), m_run.report.cache_options.page_format,
                      dtype_from_name(m_run.options.dtype));
    if (note) tell("kvzap: note: {}\n", base::shown_message(*note));
    m_run.generator.resume(loaded->reader, false);
    m_run.generator.prefill_rest(m_run.progress);
    m_earlier = m_run.report.answers.size();
    for (AnsweredQuestion& answered : loaded->state.answers) {
      m_run.report.answers.push_back(std::move(answered));
    }
    adopt(std::move(loaded->state));
    tell("kvzap: {} tokens loaded from {}\n", tokens(), base::shown_message(file));
  } catch (const AgreedError& error) {
    tell("kvzap: error: {}\n", base::shown_message(error.what()));
    // The rest of a context, which has failed, takes all of it along.
    if (m_run.generator.context().empty()) reset();
  }
}

void Conversation::reset() {
  Generator& generator = m_run.generator;
  std::vector<TokenId> context = m_run.context;
  generator.reset();
  generator.prefill(context, false, m_run.progress);
  m_run.bar.clear();
  m_earlier = m_run.report.answers.size();
  m_run.state.texts.clear();
  m_run.state.questions.clear();
  tell("kvzap: a new conversation, {} tokens of context\n", tokens());
}

/// Returns whether a threshold judges every pair as it leaves the window, including pairs of
/// messages and answers.
bool judges_what_is_said(const Pruning& pruning) {
  const bool has_budget = pruning.amount.has_budget() && !pruning.looks_up_threshold();
  if (!pruning.prunes() || has_budget || pruning.decode.every > 0) return false;
  if (pruning.policy.empty()) return true;
  const PolicyInfo& info = *parse_policy(pruning.policy_text(flag_names())).info;
  return info.judges_tokens && !info.has_own_budget;
}

}  // namespace

void declare_chat(CLI::App& app, RunOptions& options) {
  options.new_tokens = 4096;  // enough for any answer
  declare_model(app, options);
  declare_conversation(app, options, {"context"});
  declare_resume(app, options);
  const auto describe = [&](const char* name, const char* text) {
    app.get_option(name)->description(text);
  };
  describe("--prune-after",
           "apply a budget after the context; kvzap run can also apply it after each question");
  describe("--prompt", "context before the first message");
  describe("--file", "file with the context, used verbatim");
  describe(
      "--system",
      "system message before the context; replaces that of the chat template, also after /reset");
  describe("--random-weights", "generate random weights from this seed");
  describe("--evict-ratio",
           "budget: evicted share of all pairs of the context, in [0, 1); with --surrogate and "
           "without --policy: the threshold that kvzap calibrate has stored for this ratio");
  describe("--n-predict",
           "largest number of tokens of an answer; -1: until a stop token or the "
           "end of the context");
  describe(
      "--prune",
      "tokens to judge: none, prefill (the context of -p or -f) or always (with a threshold: also "
      "messages and answers); default: always with a threshold, otherwise prefill with a "
      "policy, none without");
  describe("--seed", "seed of the sampler, the same for each answer; -1: a random seed");
  describe(
      "--resume",
      "continue this snapshot of /save or of kvzap run with its options, as /load does within a "
      "conversation");
  describe("--quiet", "print no prompts, no progress and no report on standard error");
}

void settle_chat(RunOptions& options, bool resumes) {
  require(options.file != "-", "-f - is standard input, which has the conversation: name a file");
  Pruning& pruning = options.pruning;
  if (!pruning.mode && judges_what_is_said(pruning)) pruning.mode = PruneMode::always;
  // Without a context, a budget would prune only the few tokens of the chat template.
  const bool has_context = options.prompt || !options.file.empty() || resumes;
  require(!pruning.prunes() || pruning.mode == PruneMode::always || pruning.decode.every > 0 ||
              has_context,
          "a budget is met at the end of a context, and there is none: give one with -p or -f, a "
          "--threshold instead of the budget, or --decode-every N");
}

int chat(CLI::App& app, RunOptions& options, const Communicator& comm, const std::string& version,
         const std::string& revision) {
  auto resumed = open_resumed(app, options, comm);
  agree_on_usage(comm, [&] { settle_chat(options, resumed != nullptr); });
  // The context is the beginning of the chat template.
  if (!options.prompt && options.file.empty() && !resumed) options.prompt = "";
  const RunDescription description{version, revision, recorded_options(app, options),
                                   options_in_force(app, options)};
  return run(options, description, std::move(resumed), comm,
             [&](OpenRun& open) { Conversation(open, description.recorded)(); });
}

}  // namespace kvzap::driver
