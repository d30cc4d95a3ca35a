#include "commands/run/chat_loop.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <utility>

#include "commands/run/prompt.hpp"
#include "console/progress.hpp"
#include "console/signals.hpp"
#include "files/counted.hpp"
#include "files/plain_text.hpp"
#include "files/quote.hpp"
#include "parallel/meet_asleep.hpp"
#include "parallel/message.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;

/// Returns whether a person types the input: at this process's terminal, or at that of mpirun,
/// which forwards standard input.
bool is_typed() {
  return isatty(STDIN_FILENO) != 0 || (isatty(STDERR_FILENO) == 0 && Terminal(false).exists());
}

/// Returns whether a typed line can be a message, and says why not.
bool is_text(const std::string& line) {
  try {
    files::require_text_part(line, "the line", "");
    return true;
  } catch (const Error& error) {
    say("kvzap: error: {}\n", error.what());
    return false;
  }
}

}  // namespace

ChatLoop::ChatLoop(OpenRun& run, const CLI::App& app, std::string recorded)
    : m_run(run),
      m_conversation(run.conversation),
      m_comm(run.comm),
      m_app(app),
      m_recorded(std::move(recorded)),
      m_is_typed(m_comm.is_root() && is_typed()),
      m_prompts(m_is_typed && !run.options.quiet),
      m_input(m_is_typed, m_prompts, !run.options.no_history),
      m_settings{run.options.new_tokens, run.options.sampling} {}

/// Returns the signal that ends the conversation, on every rank: the largest signal of any rank.
int ChatLoop::agreed_signal() const {
  // If standard output has failed and there is no other output, the answer is lost, and the
  // conversation ends.
  const bool is_lost = prints() && std::ferror(stdout) != 0 && m_run.options.json.empty();
  const int wish = caught_signal != 0 ? static_cast<int>(caught_signal) : is_lost ? SIGPIPE : 0;
  return static_cast<int>(m_comm.all_reduce_max(std::int64_t{wish}));
}

void ChatLoop::prepare() {
  m_comm.agree_on_root([&] {
    const ChatTemplate chat_template = ChatTemplate::detect(m_run.options.model);
    m_parts = *session::PromptForm::of_template(chat_template, m_run.options.thinking == "on",
                                                m_run.options.system)
                   .parts;
    m_between = m_run.tokenizer->encode(chat_template.between_turns());
  });
  m_comm.broadcast(m_between, 0);
  begin_turn();
}

/// Ends an answer that a snapshot has unfinished. The generator has its cache.
void ChatLoop::begin_turn() {
  const bool is_open = !generator().question().empty() || !generator().answered().empty();
  m_conversation.end_open_question();
  if (is_open) end_turn();
}

/// Returns the next message or command. On rank 0.
ChatCommand ChatLoop::read() {
  m_builder.forget();
  while (true) {
    std::string line;
    const InputEnd end = m_input.read(m_builder.is_open() ? ". " : "> ", line);
    if (end == InputEnd::signal) {
      const int signal = caught_signal;
      if (!line.empty()) m_interrupts = 0;
      if (signal != SIGINT || ++m_interrupts > 1) return {Wish::stop, "", signal};
      caught_signal = 0;
      m_builder.forget();
      m_input.forget();
      if (m_prompts) say("\n(Ctrl-C once more, /exit or Ctrl-D leaves)\n");
      continue;
    }
    if (end == InputEnd::end) {
      if (m_prompts) say("\n");
      const std::string rest = m_builder.finish();
      return rest.empty() ? ChatCommand{} : ChatCommand{Wish::say, rest};
    }
    m_interrupts = 0;
    if (m_is_typed && !is_text(line)) continue;
    const bool is_first = !m_builder.is_open();
    const auto message = m_builder.add(line);
    if (!message || message->find_first_not_of(" \t\r\n") == std::string::npos) continue;
    m_input.remember(*message);
    // A pasted text of several lines may begin with a path.
    const bool is_command = is_first && !m_builder.is_quoted() && message->front() == '/' &&
                            message->find('\n') == std::string::npos;
    if (!is_command) return {Wish::say, *message};
    ChatCommand command = chat_command_of(*message);
    if (command.wish == Wish::save && command.number == 0 && !may_save(command.text)) continue;
    return command;
  }
}

/// Returns whether /save may write this file. Asks the person if it exists. On rank 0.
bool ChatLoop::may_save(const std::string& file) {
  std::error_code ignored;
  if (!fs::is_regular_file(file, ignored)) return true;  // what else there is, is refused later
  if (!m_prompts) {
    say("kvzap: error: /save {}: the file exists; /save! FILE overwrites it\n",
        files::shown_message(file));
    return false;
  }
  std::string reply;
  const std::string question = fmt::format("{} exists. Overwrite it? [y/N] ", files::shown(file));
  if (m_input.read(question, reply) == InputEnd::input && (reply == "y" || reply == "yes")) {
    return true;
  }
  say("kvzap: not saved\n");
  return false;
}

/// Returns the same message or command on every rank.
ChatCommand ChatLoop::next() {
  ChatCommand command;
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
  parallel::broadcast(m_comm, 0, command.wish, command.text, command.number);
  // Launchers send Ctrl-C to all ranks. A signal that rank 0 has handled must not end the next
  // answer.
  if (!m_comm.is_root() && command.wish != Wish::stop && caught_signal == SIGINT) caught_signal = 0;
  return command;
}

void ChatLoop::save_history() {
  const std::string failure = m_input.save_history();
  if (!failure.empty()) tell("kvzap: warning: {}\n", files::shown_message(failure));
}

void ChatLoop::operator()() {
  struct AtTheEnd {  // whatever ends it
    ChatLoop& chat;
    ~AtTheEnd() {
      try {
        chat.save_history();
      } catch (const std::exception&) {  // no memory for the warning
      }
    }
  } const at_the_end{*this};
  prepare();
  if (m_prompts) {
    tell("{} of context; /help lists commands\n", files::counted(tokens(), "token"));
  }
  while (true) {
    const ChatCommand command = next();
    if (command.wish == Wish::stop) throw Interrupted{static_cast<int>(command.number)};
    if (command.wish == Wish::leave) break;
    carry_out(command);
  }
  if (!m_run.options.quiet) stats();
}

/// Returns whether the message is in the conversation: it may be too long, or be taken back.
bool ChatLoop::answer(const std::string& text) {
  std::vector<TokenId> ids;
  try {
    m_comm.agree_on_root([&] {
      const ChatTemplate::Parts message{"", m_parts.suffix, m_parts.trim_content};
      ids = m_run.tokenizer->encode(message.prompt(text));
      const std::int64_t size = static_cast<std::int64_t>(ids.size());
      const std::int64_t after = static_cast<std::int64_t>(m_between.size()) + 1;
      if (m_run.limit > 0 && tokens() + size + after > m_run.limit) {
        throw Error(fmt::format(
            "the context is full: {} tokens of {}, and the message has {}; /undo takes back the "
            "last question, /reset starts again, /save FILE keeps the conversation",
            tokens(), m_run.limit, size));
      }
    });
  } catch (const AgreedError& error) {
    tell("kvzap: {}\n", error.what());
    return false;
  }
  m_comm.broadcast(ids, 0);
  try {
    generator().keep_state(most_undone);
  } catch (const AgreedOutOfMemory&) {
    generator().keep_state(0);  // later states would be those of other questions
    tell("kvzap: note: no memory for the state before this question: /undo cannot reach it\n");
  }
  m_conversation.add_question(text, ids);
  return run_answer();
}

/// Streams the answer, and keeps it even if it is interrupted. Returns whether it has begun.
bool ChatLoop::run_answer() {
  AnswerOptions options;
  options.max_new_tokens = m_settings.new_tokens;
  options.stop_ids = m_run.stop_ids;
  // Leaves space for the last token and the text after it.
  if (m_run.limit > 0) {
    options.max_tokens = m_run.limit - static_cast<std::int64_t>(m_between.size()) - 1;
  }
  options.sampling = m_settings.sampling;
  options.lookup = m_run.options.lookup;
  options.sampling.seed += m_tries;  // /regenerate draws other tokens
  options.progress = m_run.progress;
  options.on_token = [&](TokenId) {
    m_run.bar.clear();
    const int signal = agreed_signal();
    if (signal != 0) throw session::Stopped{signal};
  };
  int signal = 0;
  bool has_begun = true;
  try {
    signal = m_conversation.answer(
        options,
        [this](const std::string& piece) {
          m_run.bar.clear();
          if (prints()) print_now(piece);
        },
        m_run.options.form.stops);
  } catch (const Error& error) {
    if (!is_stop(error)) throw;
    signal = agreed_signal();
    has_begun = false;
  }
  m_run.bar.clear();
  if (prints() && has_begun) std::fwrite("\n", 1, 1, stdout);
  if (prints()) std::fflush(stdout);
  if (has_begun) {
    if (signal != 0) m_conversation.keep_unfinished();
    end_turn();
  }
  if (signal == 0) {
    tell_end(m_conversation.answers().back().answer);
    return true;
  }
  if (!has_begun) {
    m_conversation.forget_last();
    generator().go_back();
  }
  if (signal != SIGINT) throw Interrupted{signal};
  caught_signal = 0;
  ++m_interrupts;
  tell("(ended by Ctrl-C{}; once more leaves)\n",
       has_begun ? "" : " before it began; the message is taken back");
  return has_begun;
}

/// Says why an answer has ended, unless the model ended it.
void ChatLoop::tell_end(const Answer& answer) const {
  if (answer.stop_reason == StopReason::context_full) {
    tell(
        "kvzap: the context is full: {} tokens of {}; /undo takes back the last question, /reset "
        "starts again, /save FILE keeps the conversation\n",
        tokens(), m_run.limit);
  }
  const auto count = static_cast<std::int64_t>(answer.tokens.size());
  if (answer.stop_reason == StopReason::max_new_tokens && count > 0 && !m_run.options.quiet) {
    tell("[cut at {}; /set n {} and /regenerate give a longer answer]\n",
         files::counted(count, "token"), 2 * count);
  }
}

/// Makes the answer a part of the context, in which the user's next message has begun. A snapshot
/// holds this state, whenever it is written.
void ChatLoop::end_turn() {
  const std::vector<TokenId>& said = generator().answered();
  const auto& stops = m_run.stop_ids;
  // The template ends the answer with its own token, which is usually the same.
  const bool has_end =
      !said.empty() && (said.back() == m_between.front() ||
                        std::find(stops.begin(), stops.end(), said.back()) != stops.end());
  generator().keep_answer(m_between, !has_end);
}

}  // namespace kvzap::driver
