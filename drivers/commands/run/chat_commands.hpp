// Commands within a conversation of `kvzap chat`.
#pragma once

#include <cstdint>
#include <kvzap/engine/sampler.hpp>
#include <string>

namespace kvzap::driver {

/// The next action that the user requests.
enum class Wish : std::int64_t {
  say,
  stats,
  set,
  file,
  undo,
  regenerate,
  save,
  load,
  reset,
  help,
  refused,
  leave,
  stop
};

struct ChatCommand {
  Wish wish = Wish::leave;
  /// The message of `say`, the argument of a command, or the reason of `refused`.
  std::string text;
  /// `save`: 1 to overwrite a file without a question. `stop`: the signal.
  std::int64_t number = 0;
};

/// What /help prints.
extern const char* const chat_help;

/// Reads a line that begins with "/". A line that is no command, or that lacks its argument or has
/// one too many, is `refused`.
ChatCommand chat_command_of(const std::string& line);

/// Settings of answers that /set changes.
struct AnswerSettings {
  std::int64_t new_tokens = 0;
  SamplingOptions sampling;
};

/// Returns a line "name value" for each setting.
std::string settings_text(const AnswerSettings& settings);

/// Carries out "/set TEXT" with a name and a value. Returns the setting's line of settings_text.
/// Throws Error and changes nothing for an unknown name or a value that is no number or out of
/// range. "n -1" stands for `limit` tokens, if there is a limit, and "seed -1" for a random seed.
std::string change_setting(AnswerSettings& settings, std::string text, std::int64_t limit);

}  // namespace kvzap::driver
