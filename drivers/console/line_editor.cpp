#include "console/line_editor.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <histedit.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <clocale>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <exception>
#include <new>
#include <system_error>
#include <utility>

#include "console/signals.hpp"
#include "files/temporary_file.hpp"
#include "text/utf8.hpp"

namespace kvzap::driver {
namespace {

namespace fs = std::filesystem;

constexpr int most_entries = 1000;
constexpr std::size_t most_characters = 4096;                    // of an entry
constexpr std::uintmax_t most_bytes = std::uintmax_t{32} << 20;  // of the file

volatile std::sig_atomic_t must_redraw = 0;
extern "C" void note_redraw(int) { must_redraw = 1; }

/// Handles changes of the terminal's size, and the return from the background, in which the shell
/// has changed the terminal's settings.
class RedrawSignals {
 public:
  RedrawSignals() {
    struct sigaction action = {};
    action.sa_handler = note_redraw;
    sigemptyset(&action.sa_mask);
    action.sa_flags = static_cast<int>(SA_RESTART | SA_ONSTACK);
    for (std::size_t i = 0; i < signals.size(); ++i) sigaction(signals[i], &action, &m_before[i]);
  }
  ~RedrawSignals() {
    for (std::size_t i = 0; i < signals.size(); ++i) sigaction(signals[i], &m_before[i], nullptr);
  }
  RedrawSignals(const RedrawSignals&) = delete;
  RedrawSignals& operator=(const RedrawSignals&) = delete;

 private:
  static constexpr std::array<int, 2> signals = {SIGWINCH, SIGCONT};
  std::array<struct sigaction, signals.size()> m_before = {};
};

/// libedit asks the locale about characters. This thread has one of UTF-8 while the object exists;
/// that of the process, which may be "C", stays.
class Utf8Locale {
 public:
  explicit Utf8Locale(locale_t locale) : m_before(uselocale(locale)) {}
  ~Utf8Locale() { uselocale(m_before); }
  Utf8Locale(const Utf8Locale&) = delete;
  Utf8Locale& operator=(const Utf8Locale&) = delete;

 private:
  locale_t m_before;
};

std::wstring wide(std::string_view text) {
  std::string valid;
  text::append_lossy(valid, text, true);
  std::wstring characters;
  for (std::string_view rest = valid; !rest.empty();) {
    const auto [character, length] = text::first_character(rest);
    characters += static_cast<wchar_t>(character);
    rest.remove_prefix(length);
  }
  return characters;
}

/// Returns the line as UTF-8, without control characters, which a key may have inserted.
std::string narrow(std::wstring_view characters) {
  std::string text;
  for (const wchar_t c : characters) {
    const bool is_control = c < 0x20 || (c >= 0x7f && c < 0xa0);
    if (!is_control || c == L'\n' || c == L'\t') text::append_utf8(text, c);
  }
  return text;
}

// Control characters that no key sends, for actions without a character of their own.
constexpr wchar_t paste_key = 0x1d, delete_key = 0x1f;

/// Returns the characters by which libedit knows a key; empty for a key without a meaning.
std::wstring keys_of(const std::string& sequence) {
  static const std::pair<const char*, const wchar_t*> keys[] = {
      {"[A", L"\x10"},     {"OA", L"\x10"},     {"[B", L"\x0e"},     {"OB", L"\x0e"},
      {"[C", L"\x06"},     {"OC", L"\x06"},     {"[D", L"\x02"},     {"OD", L"\x02"},
      {"[H", L"\x01"},     {"OH", L"\x01"},     {"[1~", L"\x01"},    {"[7~", L"\x01"},
      {"[F", L"\x05"},     {"OF", L"\x05"},     {"[4~", L"\x05"},    {"[8~", L"\x05"},
      {"[3~", L"\x1f"},    {"[1;5C", L"\033f"}, {"[1;3C", L"\033f"}, {"[1;5D", L"\033b"},
      {"[1;3D", L"\033b"}, {"b", L"\033b"},     {"f", L"\033f"},     {"d", L"\033d"}};
  for (const auto& [name, characters] : keys) {
    if (sequence.compare(1, std::string::npos, name) == 0) return characters;
  }
  return {};
}

class TerminalEditor final : public LineEditor {
 public:
  TerminalEditor(const fs::path& history, locale_t locale);
  ~TerminalEditor() override;
  /// Whether libedit has started.
  bool is_good() const { return m_edit != nullptr && m_lines != nullptr; }

  InputEnd read(const std::string& prompt, std::string& line) override;
  void remember(const std::string& line) override;
  std::string save_history() override;

 private:
  static TerminalEditor& of(EditLine* edit) {
    void* self = nullptr;
    el_wget(edit, EL_CLIENTDATA, &self);
    return *static_cast<TerminalEditor*>(self);
  }
  static wchar_t* prompt_of(EditLine* edit) { return of(edit).m_prompt.data(); }
  static int character_of(EditLine* edit, wchar_t* character) {
    return of(edit).next_character(*character);
  }
  static unsigned char insert_paste(EditLine* edit, wint_t /*key*/) {
    return el_winsertstr(edit, of(edit).m_paste.c_str()) == 0 ? CC_REFRESH : CC_ERROR;
  }
  int next_character(wchar_t& character);
  bool read_input();
  void take(const InputSplitter::Part& part);
  void redraw_if_needed();
  void load_history();

  locale_t m_locale;
  std::FILE* m_output;   // standard error, whose own stream writes each character by itself
  std::FILE* m_silence;  // for libedit's notes about $TERM
  EditLine* m_edit = nullptr;
  HistoryW* m_lines = nullptr;
  fs::path m_file;
  bool m_has_changed = false;
  std::wstring m_prompt;
  InputSplitter m_splitter;
  std::string m_partial;       // of a character
  std::deque<wchar_t> m_keys;  // read, but not edited yet
  std::wstring m_paste;
  bool m_has_ended = false;
  bool m_has_signal = false;
  std::wstring m_half;  // of the line, when a signal came
  std::optional<Error> m_failure;
};

TerminalEditor::TerminalEditor(const fs::path& history, locale_t locale)
    : m_locale(locale),
      m_output(fdopen(dup(STDERR_FILENO), "w")),
      m_silence(std::fopen("/dev/null", "w")),
      m_file(history) {
  const Utf8Locale utf8(m_locale);
  m_lines = history_winit();
  if (m_output && m_silence) {
    m_edit = el_init_fd("kvzap", stdin, m_output, m_silence, STDIN_FILENO, STDERR_FILENO,
                        fileno(m_silence));
  }
  if (!is_good()) return;
  HistEventW event = {};
  history_w(m_lines, &event, H_SETSIZE, most_entries);
  history_w(m_lines, &event, H_SETUNIQUE, 1);
  load_history();
  el_wset(m_edit, EL_CLIENTDATA, this);
  el_wset(m_edit, EL_EDITOR, L"emacs");
  el_wset(m_edit, EL_PROMPT, prompt_of);
  el_wset(m_edit, EL_HIST, history_w, m_lines);
  el_wset(m_edit, EL_GETCFN, character_of);
  el_wset(m_edit, EL_ADDFN, L"kvzap-paste", L"Insert pasted text", insert_paste);
  const std::pair<std::wstring, const wchar_t*> bindings[] = {
      {{paste_key}, L"kvzap-paste"},
      {{delete_key}, L"ed-delete-next-char"},
      {L"\x17", L"ed-delete-prev-word"},  // Ctrl-W
      {L"\x12", L"em-inc-search-prev"}};  // Ctrl-R
  for (const auto& [key, action] : bindings) {
    el_wset(m_edit, EL_BIND, key.c_str(), action, nullptr);
  }
  terminal_with_paste_marks = STDERR_FILENO;
  std::fwrite(begin_paste_marks.data(), 1, begin_paste_marks.size(), m_output);
  std::fflush(m_output);
}

TerminalEditor::~TerminalEditor() {
  const Utf8Locale utf8(m_locale);
  if (terminal_with_paste_marks >= 0) {
    std::fwrite(end_paste_marks.data(), 1, end_paste_marks.size(), m_output);
    std::fflush(m_output);
    terminal_with_paste_marks = -1;
  }
  if (m_edit) el_end(m_edit);
  if (m_lines) history_wend(m_lines);
  for (std::FILE* const file : {m_output, m_silence}) {
    if (file) std::fclose(file);
  }
}

void TerminalEditor::redraw_if_needed() {
  if (must_redraw == 0) return;
  must_redraw = 0;
  // libedit believes that the terminal still has its settings.
  el_wset(m_edit, EL_PREP_TERM, 0);
  el_wset(m_edit, EL_PREP_TERM, 1);
  el_resize(m_edit);
  el_wset(m_edit, EL_REFRESH);
}

void TerminalEditor::take(const InputSplitter::Part& part) {
  const auto append = [&](const std::wstring& keys) {
    m_keys.insert(m_keys.end(), keys.begin(), keys.end());
  };
  switch (part.kind) {
    case InputSplitter::Part::Kind::text: {
      m_partial += part.bytes;
      std::string valid;
      m_partial.erase(0, text::append_lossy(valid, m_partial, false));
      append(wide(valid));
      break;
    }
    case InputSplitter::Part::Kind::escape:
      append(keys_of(part.bytes));
      break;
    case InputSplitter::Part::Kind::paste:
      m_paste = wide(part.bytes);
      append({paste_key});
      break;
  }
}

// Returns 1, 0 at the end of the input, or -1 to end the editing.
int TerminalEditor::next_character(wchar_t& character) {
  try {
    while (m_keys.empty()) {
      if (const auto part = m_splitter.next()) {
        take(*part);
        continue;
      }
      if (m_has_ended) return 0;
      if (!read_input()) return -1;
    }
    character = m_keys.front();
    m_keys.pop_front();
    return 1;
  } catch (const std::bad_alloc&) {  // no exception may pass through libedit
    m_failure = Error("no memory for the typed text");
  } catch (const std::exception& error) {
    m_failure = Error(error.what());
  }
  return -1;
}

/// Returns false if a signal has ended the wait.
bool TerminalEditor::read_input() {
  std::string bytes;
  switch (read_more(STDIN_FILENO, bytes, [this] { redraw_if_needed(); })) {
    case InputEnd::input:
      // So arrives a Ctrl-D that was typed before the terminal had the editor's settings.
      std::replace(bytes.begin(), bytes.end(), '\0', '\x04');
      m_splitter.add(bytes);
      check_message_size(m_splitter.size());
      return true;
    case InputEnd::end:
      m_splitter.finish();
      m_has_ended = true;
      return true;
    case InputEnd::signal: {
      const LineInfoW* const line = el_wline(m_edit);
      m_half.assign(line->buffer, line->lastchar);
      m_has_signal = true;
      return false;
    }
  }
  return true;
}

InputEnd TerminalEditor::read(const std::string& prompt, std::string& line) {
  const Utf8Locale utf8(m_locale);
  const RedrawSignals signals;
  m_prompt = wide(prompt);
  m_has_signal = false;
  m_half.clear();
  // Before the prompt: a key that follows it, such as Ctrl-D, must not meet the old settings.
  el_wset(m_edit, EL_PREP_TERM, 1);
  int count = 0;
  const wchar_t* const characters = el_wgets(m_edit, &count);
  std::fflush(m_output);
  if (m_failure) throw Error(*m_failure);
  if (m_has_signal || caught_signal != 0) {
    // The terminal has discarded the rest of the line, too.
    m_splitter.clear();
    m_partial.clear();
    m_keys.clear();
    line = narrow(m_half);
    return InputEnd::signal;
  }
  if (characters == nullptr || count <= 0) return InputEnd::end;
  std::wstring_view typed(characters, static_cast<std::size_t>(count));
  if (typed.back() == L'\n') typed.remove_suffix(1);
  line = narrow(typed);
  return InputEnd::input;
}

void TerminalEditor::remember(const std::string& line) {
  const Utf8Locale utf8(m_locale);
  const std::wstring entry = wide(line);
  if (entry.size() > most_characters) return;
  HistEventW event = {};
  history_w(m_lines, &event, H_ENTER, entry.c_str());
  m_has_changed = true;
}

/// Reads the file, if it is one of libedit's. Another file stays as it is.
void TerminalEditor::load_history() {
  if (m_file.empty()) return;
  std::error_code failed;
  const fs::file_status status = fs::status(m_file, failed);
  if (!fs::exists(status)) return;
  HistEventW event = {};
  if (!fs::is_regular_file(status) || fs::file_size(m_file, failed) > most_bytes || failed ||
      (fs::file_size(m_file, failed) > 0 &&
       history_w(m_lines, &event, H_LOAD, m_file.c_str()) < 0)) {
    m_file.clear();
  }
}

std::string TerminalEditor::save_history() {
  if (m_file.empty() || !m_has_changed) return "";
  const Utf8Locale utf8(m_locale);
  try {
    const fs::path target = files::target_of_links(m_file);
    std::error_code failed;
    fs::create_directories(target.parent_path().parent_path(), failed);
    if (!failed && ::mkdir(target.parent_path().c_str(), 0700) != 0 && errno != EEXIST) {
      failed.assign(errno, std::generic_category());
    }
    if (failed) {
      return fmt::format("the history {}: its folder cannot be made: {}", m_file.string(),
                         failed.message());
    }
    // The file that replaces an empty one of this mode takes the mode over.
    const files::FileDescriptor own(target, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    files::replace_file(m_file, "the history", [&](const fs::path& path) {
      std::FILE* const file = std::fopen(path.c_str(), "w");
      if (!file) throw files::system_error("cannot be written", errno);
      HistEventW event = {};
      const bool is_written = history_w(m_lines, &event, H_SAVE_FP, file) >= 0;
      if (std::fclose(file) != 0 || !is_written) {
        throw files::system_error("cannot be written", errno);
      }
    });
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

std::unique_ptr<LineEditor> LineEditor::open(const fs::path& history) {
  if (isatty(STDIN_FILENO) == 0 || isatty(STDERR_FILENO) == 0) return nullptr;
  const char* const terminal = std::getenv("TERM");
  if (!terminal || std::string_view(terminal).empty() || std::string_view(terminal) == "dumb") {
    return nullptr;
  }
  static const locale_t locale = newlocale(LC_CTYPE_MASK, "C.UTF-8", nullptr);
  if (locale == nullptr) return nullptr;
  auto editor = std::make_unique<TerminalEditor>(history, locale);
  if (!editor->is_good()) return nullptr;
  return editor;
}

}  // namespace kvzap::driver
