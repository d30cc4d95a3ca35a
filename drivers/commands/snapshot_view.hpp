// What `kvzap inspect` and `kvzap diff` share: which heads of a snapshot they look at, and how they
// show the text that it is of.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <kvzap/engine/snapshot.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "console/progress.hpp"

namespace kvzap::driver {

struct ViewOptions {
  std::optional<std::int64_t> layer, head;  // absent: all
  bool text = false;
  std::string color = "auto";  // auto, always, never
  std::string model;           // folder of the tokenizer; empty: the one that the file names
  bool json = false;
  ProgressStyle progress = ProgressStyle::automatic;
  std::string config;
};

/// Declares the flags of ViewOptions; `text_help` says what --text prints.
void declare_view(CLI::App& app, ViewOptions& options, const std::string& text_help);

/// Throws Error for flags that contradict one another.
void check_view(const ViewOptions& options);

/// The layers and KV heads that a command looks at: a range of each.
struct HeadSelection {
  int first_layer, layers;
  int first_head, heads;

  bool all_layers, all_heads;  // neither --layer nor --head was given

  bool is_all() const { return all_layers && all_heads; }
  std::int64_t count() const { return std::int64_t{layers} * heads; }
  /// "layer 7, head 2", "layer 7", "head 2 of all layers", "all layers and heads"
  std::string text() const;
};

/// Throws Error, naming flag and expected range, if the snapshot has no such layer or head.
HeadSelection select_heads(const ViewOptions& options, const SnapshotReader& reader);

/// A reader of a file whose numbers can be counted with. Throws Error, also for extents whose bytes
/// no machine could hold, as a file without keys and values may claim them.
SnapshotReader open_to_view(const std::filesystem::path& file);

/// Tokens that the sequence was given, however its positions are counted (see closed_up).
std::int64_t tokens_seen(const SnapshotHeader& header);
/// Positions fewer than tokens, where pruning closes gaps (+rerotate).
std::int64_t closed_up(const SnapshotHeader& header);
/// Throws Error, saying why, if the file's positions do not tell which tokens stayed. `purpose`:
/// "--text", "diff".
void require_positions_of_tokens(const SnapshotReader& reader, const std::string& purpose);

/// Adds 1 to counts[position] for each row of the head; there are as many counts as the header has
/// tokens.
void count_kept(const SnapshotReader& reader, int layer, int head,
                std::vector<std::int32_t>& counts);

/// Keys and values of so many rows, in the type in which the file has, or would have, them.
std::int64_t kv_bytes(const SnapshotHeader& header, std::int64_t rows);

/// "42.1 %"; "-" of nothing.
std::string percent(std::int64_t part, std::int64_t whole);

/// The tokenizer of a snapshot's text: of -m, or of the folder that the file names. Throws Error if
/// the file has no token ids, if there is no tokenizer there, or if its hash is not the recorded
/// one.
Tokenizer tokenizer_of(const SnapshotReader& reader, const std::string& model);

/// Text of each of the first `count` ids, special tokens written out: take(id's place, text). Where
/// several ids make one character, the last one has it, and the others "".
void for_each_piece(const Tokenizer& tokenizer, const std::vector<TokenId>& ids, std::int64_t count,
                    const std::function<void(std::int64_t place, const std::string& text)>& take);

/// What is said of a token by how it looks.
enum class Mark { plain, dim, first_only, second_only };

/// Prints text to standard output, parts of it marked: by colour, or between markers ("[~" and "~]"
/// for dim, "[-" and "-]" for first_only, "{+" and "+}" for second_only, as wdiff does). Control
/// characters of the text are shown as pictures, so that it cannot do anything to a terminal.
class MarkedText {
 public:
  explicit MarkedText(bool uses_color) : m_uses_color(uses_color) {}
  void append(std::string_view text, Mark mark);
  /// Ends the last line.
  void finish();

 private:
  void print(std::string_view text);
  void begin(Mark mark);
  void end();
  bool m_uses_color;
  Mark m_mark = Mark::plain;
  bool m_is_open = false;  // a colour has been turned on
  bool m_at_line_begin = true;
};

/// Whether text is to be coloured, by --color: auto is on a terminal, unless NO_COLOR is set
/// (no-color.org) or TERM is dumb.
bool uses_color(const std::string& color);

/// Text with control characters but for blank ones replaced by pictures of them.
std::string printable(std::string_view text, bool keeps_lines);

}  // namespace kvzap::driver
