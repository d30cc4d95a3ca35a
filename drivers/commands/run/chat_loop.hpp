// The conversation of `kvzap chat`, from its first message to its end.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <kvzap/engine/generate.hpp>
#include <kvzap/model/chat_template.hpp>
#include <string>
#include <vector>

#include "commands/run/chat_commands.hpp"
#include "commands/run/chat_input.hpp"
#include "commands/run/run.hpp"
#include "console/console.hpp"

namespace kvzap::driver {

/// Questions that /undo can take back, one after the other. The state before each takes a copy of
/// the window.
inline constexpr std::size_t most_undone = 4;

/// A conversation from its first message to its end. All ranks take the same steps. Rank 0 reads,
/// prints, and sends commands to the other ranks.
class ChatLoop {
 public:
  /// `app`: the command; `recorded`: see RunDescription.
  ChatLoop(OpenRun& run, const CLI::App& app, std::string recorded);
  /// Runs it. Throws Interrupted on every rank if a signal ends it.
  void operator()();

 private:
  bool prints() const { return m_comm.is_root() && m_run.options.json != "-"; }
  template <class... Arguments>
  void tell(fmt::format_string<Arguments...> format, Arguments&&... arguments) const {
    if (!m_comm.is_root()) return;
    m_run.bar.clear();
    say(format, std::forward<Arguments>(arguments)...);
  }

  void prepare();
  ChatCommand read();
  ChatCommand next();
  void save_history();
  bool may_save(const std::string& file);
  void carry_out(const ChatCommand& command);
  bool answer(const std::string& text);
  void regenerate();
  bool take_back(const char* command);
  void change(const std::string& setting);
  void attach(const std::string& file);
  void read_attached(const std::string& file);
  bool run_answer();
  void end_turn();
  void tell_end(const Answer& answer) const;
  void stats();
  void save(const std::string& file);
  void load(const std::string& file);
  void reset();
  void begin_turn();
  void archive(const session::ConversationState& state);
  Generator& generator() const { return m_conversation.generator(); }
  std::int64_t tokens() const { return generator().engine().tokens(generator().sequence()); }
  int agreed_signal() const;

  OpenRun& m_run;
  session::Conversation& m_conversation;
  const Communicator& m_comm;
  const CLI::App& m_app;
  std::string m_recorded;
  bool m_is_typed;  // by a person; on rank 0
  bool m_prompts;
  ChatLines m_input;
  MessageBuilder m_builder;
  int m_interrupts = 0;  // number of Ctrl-C since the last message
  AnswerSettings m_settings;
  std::uint64_t m_tries = 0;  // of the last question, before its answer
  std::string m_files;        // text of /file, for the next message

  ChatTemplate::Parts m_parts;     // on rank 0
  std::vector<TokenId> m_between;  // between an answer and the next message
};

}  // namespace kvzap::driver
