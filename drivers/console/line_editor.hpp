// A line editor with history for a person at a terminal.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "console/typed_input.hpp"

namespace kvzap::driver {

/// Edits lines on the terminal of standard input and standard error, with libedit. Pasted text is
/// inserted, whatever lines it has. Keys that have no meaning are ignored. While the object exists,
/// the terminal marks pasted text. One object at a time, on one thread; SignalWatch must exist.
class LineEditor {
 public:
  /// Returns an editor, or nullptr if standard input or standard error is no terminal, if the
  /// terminal cannot move its cursor ($TERM), or in a build without libedit. `history`: a file from
  /// which earlier lines are read; empty: none.
  static std::unique_ptr<LineEditor> open(const std::filesystem::path& history);
  virtual ~LineEditor() = default;
  LineEditor(const LineEditor&) = delete;
  LineEditor& operator=(const LineEditor&) = delete;

  /// Lets the person edit a line. The line is valid UTF-8, without its end, and has a newline only
  /// where one was pasted. After a signal, it is the half that was typed. The terminal has its
  /// usual settings before and after. Throws Error if reading fails.
  virtual InputEnd read(const std::string& prompt, std::string& line) = 0;
  /// Adds a line to the history.
  virtual void remember(const std::string& line) = 0;
  /// Writes the 1,000 newest lines to the history's file, which only its owner may read. Returns a
  /// sentence if that fails, else an empty text.
  virtual std::string save_history() = 0;

 protected:
  LineEditor() = default;
};

/// Returns the file of the history: kvzap/history in $XDG_STATE_HOME or in ~/.local/state; empty if
/// there is no home.
std::filesystem::path history_file();

}  // namespace kvzap::driver
