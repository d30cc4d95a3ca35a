// Shared by `kvzap inspect` and `kvzap diff`: the choice of a snapshot's heads, and the display of
// its text.
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
  std::string model;           // folder of the tokenizer; empty: the folder that the file names
  bool json = false;
  ProgressStyle progress = ProgressStyle::automatic;
  std::string config;
};

/// Declares the flags of ViewOptions. `text_help` describes the output of --text.
void declare_view(CLI::App& app, ViewOptions& options, const std::string& text_help);

/// Throws Error for flags that contradict one another.
void check_view(const ViewOptions& options);

/// The selected layers and KV heads: a range of each.
struct HeadSelection {
  int first_layer, layers;
  int first_head, heads;

  bool all_layers, all_heads;  // neither --layer nor --head was given

  bool is_all() const { return all_layers && all_heads; }
  std::int64_t count() const { return std::int64_t{layers} * heads; }
  /// Returns "layer 7, head 2", "layer 7", "head 2 of all layers" or "all layers and heads".
  std::string text() const;
};

/// Returns the selected layers and heads. Throws Error, naming flag and expected range, if the
/// snapshot has no such layer or head.
HeadSelection select_heads(const ViewOptions& options, const SnapshotReader& reader);

/// Opens a file for reading. Throws Error also if its extents are too large for arithmetic or for
/// any machine's memory, as a file without keys and values may claim.
SnapshotReader open_to_view(const std::filesystem::path& file);

/// Returns the number of tokens that the sequence received, even if positions were renumbered (see
/// removed_tokens).
std::int64_t tokens_seen(const SnapshotHeader& header);

/// Returns the rows of a head in the ring of a layer, which are never quantised.
std::int64_t ring_rows(const SnapshotHeader& header, int layer);
/// Returns the rows that a head of a layer would have without eviction: all tokens, or those that
/// the layer's own ring holds.
std::int64_t rows_seen(const SnapshotHeader& header, int layer);
/// Returns the number of positions that pruning has removed by renumbering (+rerotate).
std::int64_t removed_tokens(const SnapshotHeader& header);
/// Throws Error, giving the reason, if the file's positions do not identify the tokens that stayed.
/// `purpose`: "--text", "diff".
void require_positions_of_tokens(const SnapshotReader& reader, const std::string& purpose);

/// Adds 1 to counts[position] for each row of the head. `counts` must have one element per token of
/// the header.
void count_kept(const SnapshotReader& reader, int layer, int head,
                std::vector<std::int32_t>& counts);

/// Returns the bytes of keys and values for this number of rows of a layer, `wide` of them not
/// quantised, in the types of the file, even if the file has none.
std::int64_t kv_bytes(const SnapshotHeader& header, int layer, std::int64_t rows,
                      std::int64_t wide);

/// Formats "42.1 %", or "-" if `whole` is 0.
std::string percent(std::int64_t part, std::int64_t whole);

/// Returns the tokenizer of a snapshot's text, from -m or from the folder that the file names.
/// Throws Error if the file has no token ids, the folder has no tokenizer, or its hash differs from
/// the recorded one.
Tokenizer tokenizer_of(const SnapshotReader& reader, const std::string& model);

/// Calls take(index, text) for each of the first `count` ids, with special tokens written out. If
/// several ids make one character, the last one has it, and the others have "".
void for_each_piece(const Tokenizer& tokenizer, const std::vector<TokenId>& ids, std::int64_t count,
                    const std::function<void(std::int64_t place, const std::string& text)>& take);

/// The marking of a token.
enum class Mark { plain, dim, first_only, second_only };

/// Prints text to standard output with marked parts. Marks are colours, or markers as in wdiff:
/// "[~" and "~]" for dim, "[-" and "-]" for first_only, "{+" and "+}" for second_only. Control
/// characters of the text are shown as pictures, so that they cannot affect a terminal.
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
  bool m_is_open = false;  // whether a colour is on
  bool m_at_line_begin = true;
};

/// Returns whether to colour text, by --color. `auto` colours on a terminal, unless NO_COLOR is set
/// (no-color.org) or TERM is dumb.
bool uses_color(const std::string& color);

/// Replaces control characters, except blank ones, by pictures of them.
std::string printable(std::string_view text, bool keeps_lines);

}  // namespace kvzap::driver
