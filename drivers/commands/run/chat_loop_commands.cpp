// Commands of a conversation.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "commands/run/chat_loop.hpp"
#include "commands/run/report.hpp"
#include "commands/run/snapshots.hpp"
#include "files/counted.hpp"
#include "files/plain_text.hpp"
#include "files/quote.hpp"
#include "options/one_file.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;

/// Limit on the text of /file: more than any model's context holds.
constexpr std::uintmax_t most_file_bytes = std::uintmax_t{64} << 20;

/// Throws Error unless a command's file is regular or missing: a pipe would keep the conversation
/// waiting.
void check_regular(const std::string& command, const std::string& file) {
  std::error_code ignored;
  const fs::file_status status = fs::status(file, ignored);
  if (!fs::exists(status) || fs::is_regular_file(status)) return;
  throw Error(fmt::format("{} {}: expected a file, found {}", command, file,
                          fs::is_directory(status) ? "a folder" : "a pipe or a device"));
}

}  // namespace

void ChatLoop::carry_out(const ChatCommand& command) {
  switch (command.wish) {
    case Wish::say:
      m_tries = 0;
      if (answer(m_files + command.text)) m_files.clear();
      return;
    case Wish::stats:
      return stats();
    case Wish::set:
      return change(command.text);
    case Wish::file:
      return attach(command.text);
    case Wish::undo:
      if (take_back("/undo")) tell("kvzap: taken back; {}\n", files::counted(tokens(), "token"));
      return;
    case Wish::regenerate:
      return regenerate();
    case Wish::save:
      return save(command.text);
    case Wish::load:
      return load(command.text);
    case Wish::reset:
      return reset();
    case Wish::help:
      return tell("{}", chat_help);
    case Wish::refused:
      return tell("kvzap: {}\n", files::shown_message(command.text));
    case Wish::stop:
    case Wish::leave:
      return;
  }
}

void ChatLoop::change(const std::string& setting) {
  if (setting.empty()) return tell("{}", settings_text(m_settings));
  try {
    const std::string line = change_setting(m_settings, setting, m_run.limit);
    tell("{}", line);
  } catch (const Error& error) {  // the same on every rank
    tell("kvzap: error: {}\n", files::shown_message(error.what()));
  }
}

/// Puts the text of a file before the next message. Rank 0 has it. Throws AgreedError if it cannot
/// be read and nobody types who could notice: the next question is about it.
void ChatLoop::attach(const std::string& file) {
  m_comm.agree_on_root([&] {
    try {
      read_attached(file);
    } catch (const Error& error) {
      if (!m_is_typed) throw;
      tell("kvzap: error: {}\n", files::shown_message(error.what()));
    }
  });
}

void ChatLoop::read_attached(const std::string& file) {
  check_regular("/file", file);
  std::string text = files::read_plain_text(file == "-" ? "./-" : file, "/file", most_file_bytes);
  const std::size_t bytes = text.size();
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.pop_back();
  if (text.empty()) throw Error(fmt::format("/file {}: the file is empty", file));
  m_files += text + "\n\n";
  tell("kvzap: {} ({} bytes) will begin the next message\n", files::shown_message(file), bytes);
}

/// Drops the last question and its answer. Returns whether there was one.
bool ChatLoop::take_back(const char* command) {
  if (generator().kept_states() == 0) {
    const bool has_answers = !m_conversation.answers().empty();
    tell("kvzap: {}: {}\n", command,
         has_answers ? fmt::format("the state before that question is gone (kvzap keeps those of "
                                   "the last {} questions since the start or /load)",
                                   most_undone)
                     : "there is no answer yet");
    return false;
  }
  generator().go_back();
  m_conversation.forget_last();
  return true;
}

void ChatLoop::regenerate() {
  const std::vector<std::string>& texts = m_conversation.state().texts;
  const std::string text = texts.empty() ? "" : texts.back();
  if (!take_back("/regenerate")) return;
  if (m_settings.sampling.temperature == 0) {
    tell("kvzap: note: the answer stays the same at temperature 0; /set temperature 0.7 draws\n");
  }
  ++m_tries;
  answer(text);
}

void ChatLoop::stats() {
  const CacheReport cache = generator().report();
  if (!m_comm.is_root()) return;
  std::int64_t kept = 0, rows = 0;
  for (const auto& layer : cache.kept) {
    for (const std::int64_t head : layer) {
      kept += head;
      rows += cache.tokens;
    }
  }
  const std::size_t answers = m_conversation.answers().size();
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
  for (const AnsweredQuestion& answered : m_conversation.answers()) {
    const Answer& answer = answered.answer;
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

void ChatLoop::save(const std::string& file) {
  try {
    m_comm.agree_on_root([&] {
      // The report is written last, and would replace the conversation.
      std::vector<std::pair<const char*, std::string>> others = {{"--json", m_run.options.json}};
      for (const std::string& read : m_run.options.files) others.emplace_back("-f", read);
      for (const auto& [flag, other] : others) {
        if (!other.empty() && name_one_file(file, other)) {
          throw Error(fmt::format("/save {}: {} names the same file", file, flag));
        }
      }
    });
    for (const std::string& warning : check_snapshot_writable(file, m_comm)) {
      tell("kvzap: warning: {}\n", warning);
    }
    m_conversation.note_context(generator().report());
    SnapshotInfo info;
    if (m_comm.is_root()) info = m_conversation.info();
    for (const std::string& warning :
         generator().write_snapshot(file, std::move(info), SnapshotOptions())) {
      tell("kvzap: warning: {}\n", warning);
    }
    tell("kvzap: {} saved in {}\n", files::counted(tokens(), "token"), files::shown_message(file));
  } catch (const AgreedError& error) {
    tell("kvzap: error: {}\n", files::shown_message(error.what()));
  }
}

void ChatLoop::load(const std::string& file) {
  try {
    m_comm.agree_on_root([&] { check_regular("/load", file); });
    const auto loaded = open_fitting(m_app, file, m_recorded, m_conversation,
                                     dtype_from_name(m_run.options.dtype), m_comm);
    m_comm.agree([&] {
      const SnapshotHeader& header = loaded->reader.header();
      const std::int64_t window = generator().engine().options().pruning.window;
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
    if (note) tell("kvzap: note: {}\n", files::shown_message(*note));
    const session::ConversationState before = m_conversation.state();
    m_conversation.resume(loaded->reader, std::move(loaded->state), false);
    archive(before);
    generator().prefill_rest(m_run.progress);
    begin_turn();
    tell("kvzap: {} loaded from {}\n", files::counted(tokens(), "token"),
         files::shown_message(file));
  } catch (const AgreedError& error) {
    tell("kvzap: error: {}\n", files::shown_message(error.what()));
    // The rest of a context, which has failed, takes all of it along.
    if (generator().context().empty()) reset();
  }
}

/// Adds the answered questions of a conversation that is over to the report.
void ChatLoop::archive(const session::ConversationState& state) {
  const auto count = static_cast<std::ptrdiff_t>(state.answers.size());
  std::vector<AnsweredQuestion>& answers = m_run.report.answers;
  std::vector<std::vector<TokenId>>& questions = m_run.report.question_ids;
  answers.insert(answers.end(), state.answers.begin(), state.answers.end());
  questions.insert(questions.end(), state.questions.begin(), state.questions.begin() + count);
}

void ChatLoop::reset() {
  archive(m_conversation.state());
  m_conversation.forget_questions();
  generator().reset();
  generator().prefill(m_run.context, false, m_run.progress);
  m_run.bar.clear();
  m_files.clear();
  tell("kvzap: a new conversation, {} of context\n", files::counted(tokens(), "token"));
}

}  // namespace kvzap::driver
