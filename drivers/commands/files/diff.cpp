#include "commands/files/diff.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "commands/support/setup.hpp"
#include "console/console.hpp"
#include "console/progress.hpp"
#include "options/options.hpp"

namespace kvzap::driver {
namespace {

using nlohmann::ordered_json;

/// Rows of a head, or of several heads together, in two snapshots.
struct Overlap {
  std::int64_t both = 0, only_first = 0, only_second = 0;

  Overlap& operator+=(const Overlap& other) {
    both += other.both;
    only_first += other.only_first;
    only_second += other.only_second;
    return *this;
  }
  /// Intersection over union of the rows that the snapshots keep; 1 if neither keeps any.
  double jaccard() const {
    const std::int64_t either = both + only_first + only_second;
    return either == 0 ? 1 : static_cast<double>(both) / static_cast<double>(either);
  }
};

struct LayerOverlap {
  int layer = 0;
  Overlap all;
  std::vector<Overlap> heads;  // the selected heads
};

/// Number of heads that keep each token.
struct KeepingHeads {
  std::vector<std::int32_t> first, second;
};

[[noreturn]] void differ(const SnapshotReader& a, const SnapshotReader& b,
                         const std::string& what) {
  throw Error(
      fmt::format("{} and {} cannot be compared: {}", a.file().string(), b.file().string(), what));
}

/// Returns the number of tokens to compare: the context's tokens that were run. Questions and
/// answers differ between runs. If a file does not record its context, all its tokens count.
std::int64_t context_of(const SnapshotHeader& header) {
  return header.info.token_ids.empty() ? header.tokens
                                       : std::min(header.info.context_tokens, header.tokens);
}

/// Returns the number of tokens to compare. Throws Error, naming the difference, unless both
/// snapshots have the same text and extents.
std::int64_t compared_tokens(const SnapshotReader& a, const SnapshotReader& b) {
  const SnapshotHeader &ha = a.header(), &hb = b.header();
  const auto same = [&](std::int64_t in_a, std::int64_t in_b, const char* what) {
    if (in_a != in_b) {
      differ(a, b, fmt::format("the first has {} {}, the second {}", in_a, what, in_b));
    }
  };
  same(ha.n_layers, hb.n_layers, "layers");
  same(ha.n_kv_heads, hb.n_kv_heads, "KV heads");
  same(ha.head_dim, hb.head_dim, "numbers in a key (head_dim)");
  require_positions_of_tokens(a, "diff");
  require_positions_of_tokens(b, "diff");
  const auto &ids_a = ha.info.token_ids, &ids_b = hb.info.token_ids;
  const std::int64_t tokens = context_of(ha);
  if (!ids_a.empty() && !ids_b.empty()) {
    const std::int64_t common = std::min({ha.info.context_tokens, hb.info.context_tokens,
                                          static_cast<std::int64_t>(ids_a.size()),
                                          static_cast<std::int64_t>(ids_b.size())});
    const auto [at, other] = std::mismatch(ids_a.begin(), ids_a.begin() + common, ids_b.begin());
    if (at != ids_a.begin() + common) {
      differ(a, b,
             fmt::format("they are of different texts: token {} is {} in the first and {} in the "
                         "second",
                         at - ids_a.begin(), *at, *other));
    }
    same(ha.info.context_tokens, hb.info.context_tokens, "tokens of context");
    if (tokens != context_of(hb)) {
      differ(a, b,
             fmt::format("of {} tokens of context the first has run {}, the second {}",
                         ha.info.context_tokens, tokens, context_of(hb)));
    }
  } else {
    same(tokens, context_of(hb), "tokens");
  }
  return tokens;
}

Overlap compare_head(const SnapshotReader& a, const SnapshotReader& b, int layer, int head,
                     std::int64_t tokens, KeepingHeads* keeping) {
  // Positions ascend. Those of question and answer follow the context's.
  const auto in_a = a.rows(layer, head, false).positions;
  const auto in_b = b.rows(layer, head, false).positions;
  Overlap overlap;
  auto of_a = in_a.begin(), of_b = in_b.begin();
  while (true) {
    const std::int64_t first = of_a == in_a.end() ? tokens : std::int64_t{*of_a};
    const std::int64_t second = of_b == in_b.end() ? tokens : std::int64_t{*of_b};
    const std::int64_t token = std::min(first, second);
    if (token >= tokens) return overlap;
    overlap.both += first == second ? 1 : 0;
    overlap.only_first += first < second ? 1 : 0;
    overlap.only_second += second < first ? 1 : 0;
    if (keeping) {
      keeping->first[token] += first == token ? 1 : 0;
      keeping->second[token] += second == token ? 1 : 0;
    }
    if (first == token) ++of_a;
    if (second == token) ++of_b;
  }
}

ordered_json overlap_json(const Overlap& o) {
  return {{"jaccard", o.jaccard()},
          {"both", o.both},
          {"only_a", o.only_first},
          {"only_b", o.only_second}};
}

std::string table_row(const std::string& layer, const std::string& head, const Overlap& o) {
  return fmt::format("{:>5} {:>5} {:>8.4f} {:>10} {:>10} {:>10} {:>10} {:>10}\n", layer, head,
                     o.jaccard(), o.both + o.only_first, o.both + o.only_second, o.both,
                     o.only_first, o.only_second);
}

std::string table(const std::vector<LayerOverlap>& layers, const HeadSelection& selection,
                  const Overlap& all) {
  std::string text =
      fmt::format("{:>5} {:>5} {:>8} {:>10} {:>10} {:>10} {:>10} {:>10}\n", "layer", "head",
                  "Jaccard", "A keeps", "B keeps", "both", "only A", "only B");
  if (selection.count() > 1) text += table_row("all", "all", all);
  for (const LayerOverlap& layer : layers) {
    const std::string name = fmt::format("{}", layer.layer);
    if (selection.all_heads) text += table_row(name, "all", layer.all);
    for (int i = 0; i < selection.heads; ++i) {
      text += table_row(name, fmt::format("{}", selection.first_head + i), layer.heads[i]);
    }
  }
  return text;
}

Mark mark_of(bool first, bool second) {
  if (first && second) return Mark::plain;
  if (first) return Mark::first_only;
  return second ? Mark::second_only : Mark::dim;
}

/// Prints the text. A token counts as kept if any selected head keeps it.
void print_text(const Tokenizer& tokenizer, const std::vector<TokenId>& ids,
                const KeepingHeads& keeping, const ViewOptions& view) {
  const bool color = uses_color(view.color);
  say("kvzap: note: {}\n",
      color ? "tokens that only A keeps are red, only B green, neither dimmed"
            : "tokens that only A keeps are in [- -], only B in {+ +}, neither in [~ ~]");
  std::fflush(stderr);
  MarkedText output(color);
  bool first = false, second = false;  // whether any token of the current character is kept
  const auto count = static_cast<std::int64_t>(keeping.first.size());
  for_each_piece(tokenizer, ids, count, [&](std::int64_t i, const std::string& text) {
    first = first || keeping.first[i] != 0;
    second = second || keeping.second[i] != 0;
    if (text.empty()) return;
    output.append(text, mark_of(first, second));
    first = second = false;
  });
  output.finish();
}

void compare(const DiffOptions& options, const std::string& version) {
  const SnapshotReader a = open_to_view(options.first), b = open_to_view(options.second);
  const std::int64_t tokens = compared_tokens(a, b);
  const HeadSelection selection = select_heads(options.view, a);
  // Either snapshot may have the token ids.
  const SnapshotReader& told = a.header().info.token_ids.empty() ? b : a;
  std::optional<Tokenizer> tokenizer;
  KeepingHeads keeping;
  if (options.view.text) {
    tokenizer.emplace(tokenizer_of(told, options.view.model));
    keeping = {std::vector<std::int32_t>(tokens), std::vector<std::int32_t>(tokens)};
  }
  Progress progress(true, options.view.progress);
  std::vector<LayerOverlap> layers;
  Overlap all;
  for (int i = 0; i < selection.layers; ++i) {
    LayerOverlap layer;
    layer.layer = selection.first_layer + i;
    for (int h = 0; h < selection.heads; ++h) {
      layer.heads.push_back(compare_head(a, b, layer.layer, selection.first_head + h, tokens,
                                         tokenizer ? &keeping : nullptr));
      layer.all += layer.heads.back();
    }
    // Layers that are not pruned always agree.
    const auto index = static_cast<std::size_t>(layer.layer);
    if (a.header().own_rings[index] == 0 || b.header().own_rings[index] == 0) all += layer.all;
    layers.push_back(std::move(layer));
    progress.update("diff", i + 1, selection.layers);
  }
  progress.clear();
  const auto& ids = told.header().info.token_ids;
  const std::string model_a = a.header().info.model_hash, model_b = b.header().info.model_hash;
  const bool other_model = !model_a.empty() && !model_b.empty() && model_a != model_b;
  if (options.view.json) {
    ordered_json json = {
        {"format", "kvzap.diff"},
        {"format_version", 1},
        {"version", version},
        {"a", options.first},
        {"b", options.second},
        {"same_model",
         model_a.empty() || model_b.empty() ? ordered_json() : ordered_json(!other_model)},
        {"tokens", tokens}};
    json.update(overlap_json(all));
    json["layers"] = ordered_json::array();
    for (const LayerOverlap& layer : layers) {
      ordered_json one = {{"layer", layer.layer}};
      if (selection.all_heads) one.update(overlap_json(layer.all));
      one["heads"] = ordered_json::array();
      for (int i = 0; i < selection.heads; ++i) {
        ordered_json head = {{"head", selection.first_head + i}};
        head.update(overlap_json(layer.heads[i]));
        one["heads"].push_back(std::move(head));
      }
      json["layers"].push_back(std::move(one));
    }
    if (tokenizer) {
      std::vector<std::string> texts;
      for_each_piece(*tokenizer, ids, tokens,
                     [&](std::int64_t, const std::string& text) { texts.push_back(text); });
      json["text"] = {{"ids", std::vector<TokenId>(ids.begin(), ids.begin() + tokens)},
                      {"texts", std::move(texts)},
                      {"keeping_heads_a", keeping.first},
                      {"keeping_heads_b", keeping.second}};
    }
    write_whole(
        "-",
        json.dump(tokenizer ? -1 : 2, ' ', false, ordered_json::error_handler_t::replace) + "\n");
    return;
  }
  if (other_model) {
    say("kvzap: warning: A and B are of models that are not the same (hash)\n");
  }
  if (tokenizer) return print_text(*tokenizer, ids, keeping, options.view);
  write_whole("-",
              fmt::format("A       {}\nB       {}\ntokens  {}\n\n", printable(options.first, false),
                          printable(options.second, false), tokens) +
                  table(layers, selection, all));
}

}  // namespace

void declare(CLI::App& app, DiffOptions& o) {
  app.add_option("A.h5", o.first, "one snapshot")->required()->type_name("FILE");
  app.add_option("B.h5", o.second, "another snapshot of the same text")
      ->required()
      ->type_name("FILE");
  declare_view(app, o.view,
               "print the text and mark tokens that only A, only B or neither keeps in any of the "
               "chosen heads: red, green, dimmed on a terminal, elsewhere between [- -], {+ +}, "
               "[~ ~]");
}

void diff(const DiffOptions& options, const Communicator& comm, const std::string& version) {
  agree_on_usage_of_root(comm, [&] {
    check_view(options.view);
    compare(options, version);
    flush_stdout();
  });
}

}  // namespace kvzap::driver
