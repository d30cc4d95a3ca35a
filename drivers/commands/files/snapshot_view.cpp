#include "commands/files/snapshot_view.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>

#include "commands/support/model_loading.hpp"
#include "gguf/model_file.hpp"
#include "options/options.hpp"

namespace kvzap::driver {
namespace {

std::string place(const SnapshotReader& reader) {
  return fmt::format("snapshot {}", reader.file().string());
}

/// Returns the number of a flag, checked against `count`.
std::optional<int> chosen(const std::optional<std::int64_t>& value, const std::string& flag,
                          std::int64_t count, const std::string& what,
                          const SnapshotReader& reader) {
  if (!value) return std::nullopt;
  require(*value < count, fmt::format("{} {}: expected 0 to {}, the {} of {}", flag, *value,
                                      count - 1, what, reader.file().string()));
  return static_cast<int>(*value);
}

struct Markers {
  const char *begin, *end;  // without colour
  const char *on, *off;     // ECMA-48, "select graphic rendition"
};

Markers markers_of(Mark mark) {
  switch (mark) {
    case Mark::plain:
      break;
    case Mark::dim:
      return {"[~", "~]", "\033[2m", "\033[22m"};
    case Mark::first_only:
      return {"[-", "-]", "\033[31m", "\033[39m"};
    case Mark::second_only:
      return {"{+", "+}", "\033[32m", "\033[39m"};
  }
  return {"", "", "", ""};
}

}  // namespace

void declare_view(CLI::App& app, ViewOptions& o, const std::string& text_help) {
  app.add_option("--layer", o.layer, "show only this layer, counted from 0; default: all")
      ->check(not_negative)
      ->type_name("INT");
  app.add_option("--head", o.head, "show only this KV head, counted from 0; default: all")
      ->check(not_negative)
      ->type_name("INT");
  app.add_flag("--text", o.text, text_help);
  app.add_option("--color", o.color,
                 "how --text marks tokens: by colour (always), between markers (never), or by "
                 "colour on terminals only (auto)")
      ->check(CLI::IsMember({"auto", "always", "never"}))
      ->capture_default_str();
  app.add_option(
         "-m,--model", o.model,
         "model whose tokenizer --text uses, a folder or a GGUF file; default: the model that "
         "the file names")
      ->type_name("MODEL");
  app.add_flag("--json", o.json, "print JSON");
  declare_progress(app, o.progress, "Options");
  declare_deck(app, o.config, "Options");
}

void check_view(const ViewOptions& o) {
  require(o.model.empty() || o.text, "-m has no effect without --text");
}

std::string HeadSelection::text() const {
  if (all_layers && all_heads) return "all layers and heads";
  if (all_layers) return fmt::format("head {} of all layers", first_head);
  if (all_heads) return fmt::format("layer {}", first_layer);
  return fmt::format("layer {}, head {}", first_layer, first_head);
}

HeadSelection select_heads(const ViewOptions& options, const SnapshotReader& reader) {
  const SnapshotHeader& header = reader.header();
  const auto layer = chosen(options.layer, "--layer", header.n_layers, "layers", reader);
  const auto head = chosen(options.head, "--head", header.n_kv_heads, "KV heads", reader);
  return {layer.value_or(0),
          layer ? 1 : static_cast<int>(header.n_layers),
          head.value_or(0),
          head ? 1 : static_cast<int>(header.n_kv_heads),
          !layer,
          !head};
}

SnapshotReader open_to_view(const std::filesystem::path& file) {
  SnapshotReader reader(file);
  const SnapshotHeader& header = reader.header();
  constexpr std::int64_t most_tokens = std::numeric_limits<std::int32_t>::max();
  const std::int64_t closed = removed_tokens(header);
  if (closed < 0 || closed > most_tokens) {
    throw Error(fmt::format("{}: /state: closed_up is {}; expected 0 to {}", place(reader), closed,
                            most_tokens));
  }
  // Uses floating-point numbers, which do not overflow.
  const double bytes =
      2.0 * static_cast<double>(tokens_seen(header)) * static_cast<double>(header.n_layers) *
      static_cast<double>(header.n_kv_heads) * static_cast<double>(header.head_dim) *
      static_cast<double>(size_of(header.dtype));
  if (bytes >= 0x1p62) {
    throw Error(fmt::format(
        "{}: {} tokens of {} layers, {} KV heads and head_dim {} would be {:.1e} bytes, which "
        "cannot be",
        place(reader), tokens_seen(header), header.n_layers, header.n_kv_heads, header.head_dim,
        bytes));
  }
  return reader;
}

std::int64_t removed_tokens(const SnapshotHeader& header) {
  const auto found = header.info.state.find("closed_up");
  return found == header.info.state.end() ? 0 : found->second;
}

std::int64_t tokens_seen(const SnapshotHeader& header) {
  return header.tokens + removed_tokens(header);
}

std::int64_t ring_rows(const SnapshotHeader& header, int layer) {
  const auto index = static_cast<std::size_t>(layer);
  const std::int64_t own = header.own_rings[index];
  return std::min(header.tokens - header.ring_first[index], own > 0 ? own : header.window);
}

std::int64_t rows_seen(const SnapshotHeader& header, int layer) {
  const bool has_pages = header.own_rings[static_cast<std::size_t>(layer)] == 0;
  return has_pages ? tokens_seen(header) : ring_rows(header, layer);
}

void require_positions_of_tokens(const SnapshotReader& reader, const std::string& purpose) {
  if (removed_tokens(reader.header()) != 0) {
    throw Error(fmt::format(
        "{}: {} needs positions that tell which tokens stayed; here pruning has closed their gaps "
        "(+rerotate)",
        place(reader), purpose));
  }
}

void count_kept(const SnapshotReader& reader, int layer, int head,
                std::vector<std::int32_t>& counts) {
  for (const std::int64_t position : reader.rows(layer, head, false).positions) {
    ++counts.at(position);
  }
}

std::int64_t kv_bytes(const SnapshotHeader& header, int layer, std::int64_t rows,
                      std::int64_t wide) {
  const auto row_dim = static_cast<int>(header.row_dims[static_cast<std::size_t>(layer)]);
  const auto row_bytes = [&](const PageFormat& format) {
    return static_cast<std::int64_t>(page_row_values(row_dim, size_of(header.dtype), format));
  };
  return wide * row_bytes(header.format.wide()) + (rows - wide) * row_bytes(header.format);
}

std::string percent(std::int64_t part, std::int64_t whole) {
  if (whole == 0) return "-";
  return fmt::format("{:.1f} %", 100 * static_cast<double>(part) / static_cast<double>(whole));
}

Tokenizer tokenizer_of(const SnapshotReader& reader, const std::string& model) {
  const SnapshotHeader& header = reader.header();
  if (header.info.token_ids.empty()) {
    throw Error(fmt::format("{}: has no token ids, which --text needs", place(reader)));
  }
  const auto count = static_cast<std::int64_t>(header.info.token_ids.size());
  if (count < header.tokens) {
    throw Error(fmt::format("{}: expected the ids of its {} tokens, found {}", place(reader),
                            header.tokens, count));
  }
  const std::filesystem::path folder = model.empty() ? header.info.model : model;
  if (!gguf::has_model_file(folder, "tokenizer.json")) {
    throw Error(fmt::format("{}: the model {}{} has no tokenizer.json{}", place(reader),
                            printable(folder.string(), false),
                            model.empty() ? ", which it names," : "",
                            model.empty() ? "; -m names another one" : ""));
  }
  if (!header.info.tokenizer_hash.empty()) {
    const std::string hash = hashes_of_model(folder, false).tokenizer;
    if (hash != header.info.tokenizer_hash) {
      throw Error(fmt::format(
          "{}: the tokenizer in {} is another one than the run's: expected hash {}, found {}",
          place(reader), printable(folder.string(), false),
          printable(header.info.tokenizer_hash, false), hash));
    }
  }
  return Tokenizer::load(folder);
}

void for_each_piece(const Tokenizer& tokenizer, const std::vector<TokenId>& ids, std::int64_t count,
                    const std::function<void(std::int64_t, const std::string&)>& take) {
  Tokenizer::StreamDecoder decoder(tokenizer, false);
  for (std::int64_t i = 0; i < count; ++i) {
    std::string text = decoder.append(ids[i]);
    if (i + 1 == count) text += decoder.finish();
    take(i, text);
  }
}

std::string printable(std::string_view text, bool keeps_lines) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const bool is_kept = keeps_lines && (byte == '\n' || byte == '\t');
    const auto next = i + 1 < text.size() ? static_cast<unsigned char>(text[i + 1]) : 0;
    if (byte < 0x20 && !is_kept) {
      // U+2400 and the following characters are pictures of U+0000 and the following ones.
      out += "\xe2\x90";
      out += static_cast<char>(0x80 + byte);
    } else if (byte == 0x7f) {
      out += "\xe2\x90\xa1";
    } else if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {
      out += "\xef\xbf\xbd";  // U+0080 to U+009F have no pictures
      ++i;
    } else {
      out += text[i];
    }
  }
  return out;
}

bool uses_color(const std::string& color) {
  if (color != "auto") return color == "always";
  const auto is_set = [](const char* name) {
    const char* value = std::getenv(name);
    return value && *value;
  };
  const char* terminal = std::getenv("TERM");
  return isatty(STDOUT_FILENO) != 0 && !is_set("NO_COLOR") &&
         !(terminal && std::string_view(terminal) == "dumb");
}

void MarkedText::print(std::string_view text) { std::fwrite(text.data(), 1, text.size(), stdout); }

void MarkedText::begin(Mark mark) {
  print(m_uses_color ? markers_of(mark).on : markers_of(mark).begin);
  m_is_open = mark != Mark::plain;
}

void MarkedText::end() {
  if (!m_is_open) return;
  print(m_uses_color ? markers_of(m_mark).off : markers_of(m_mark).end);
  m_is_open = false;
}

void MarkedText::append(std::string_view text, Mark mark) {
  if (text.empty()) return;
  if (mark != m_mark) end();
  m_mark = mark;
  const std::string shown = printable(text, true);
  std::string_view left = shown;
  while (!left.empty()) {
    // Pagers reset the colour at the end of a line.
    const bool breaks = m_uses_color && left.front() == '\n';
    if (breaks) end();
    if (!breaks && !m_is_open) begin(mark);
    std::size_t length = breaks ? 1 : left.size();
    if (m_uses_color && !breaks) length = std::min(left.find('\n'), left.size());
    print(left.substr(0, length));
    m_at_line_begin = left[length - 1] == '\n';
    left.remove_prefix(length);
  }
}

void MarkedText::finish() {
  const bool ends_inside = m_is_open;
  end();
  // A marker comes after the line's end.
  if (!m_at_line_begin || (ends_inside && !m_uses_color)) print("\n");
  m_mark = Mark::plain;
}

}  // namespace kvzap::driver
