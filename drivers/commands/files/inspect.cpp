#include "commands/files/inspect.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "commands/files/inspect_model.hpp"
#include "commands/lab/quantiles.hpp"
#include "commands/run/report.hpp"
#include "commands/support/setup.hpp"
#include "console/console.hpp"
#include "console/progress.hpp"
#include "files/json_file.hpp"
#include "model/find_model.hpp"
#include "options/options.hpp"
#include "session/recorded.hpp"

namespace kvzap::driver {
namespace {

using nlohmann::ordered_json;

/// Numbers of one head, or of all selected heads of a layer.
struct KeptRows {
  std::int64_t kept = 0;
  std::int64_t unjudged = 0;
  std::int64_t unscored = 0;  // rows whose score is NaN
  Quantiles scores;
};

struct LayerRows {
  int layer = 0;
  KeptRows all;
  std::vector<KeptRows> heads;  // the selected ones
};

LayerRows read_layer(const SnapshotReader& reader, const HeadSelection& selection, int layer) {
  LayerRows result;
  result.layer = layer;
  std::vector<float> scores_of_layer;
  for (int i = 0; i < selection.heads; ++i) {
    SnapshotRows rows = reader.rows(layer, selection.first_head + i, false);
    KeptRows head;
    head.kept = static_cast<std::int64_t>(rows.positions.size());
    head.unjudged = std::count(rows.judged.begin(), rows.judged.end(), 0);
    head.unscored = std::count_if(rows.scores.begin(), rows.scores.end(),
                                  [](float score) { return std::isnan(score); });
    scores_of_layer.insert(scores_of_layer.end(), rows.scores.begin(), rows.scores.end());
    head.scores = quantiles_of(rows.scores);
    result.all.kept += head.kept;
    result.all.unscored += head.unscored;
    result.all.unjudged += head.unjudged;
    result.heads.push_back(head);
  }
  result.all.scores = quantiles_of(scores_of_layer);
  return result;
}

std::int64_t kept_rows(const SnapshotHeader& header) {
  std::int64_t rows = 0;
  for (const auto& offsets : header.offsets) rows += offsets.back();
  return rows;
}

/// Returns the sum of what a function returns for each layer.
template <class OfLayer>
std::int64_t of_layers(const SnapshotHeader& header, const OfLayer& of_layer) {
  std::int64_t all = 0;
  for (int layer = 0; layer < static_cast<int>(header.n_layers); ++layer) all += of_layer(layer);
  return all;
}

std::int64_t all_rows(const SnapshotHeader& header) {
  return of_layers(header, [&](int layer) { return rows_seen(header, layer); }) * header.n_kv_heads;
}

/// Returns the bytes of the rows that are kept.
std::int64_t kept_bytes(const SnapshotHeader& header) {
  return of_layers(header, [&](int layer) {
    return kv_bytes(header, layer, header.offsets[static_cast<std::size_t>(layer)].back(),
                    ring_rows(header, layer) * header.n_kv_heads);
  });
}

/// Returns the bytes of all rows, without eviction and not quantised.
std::int64_t full_bytes(const SnapshotHeader& header) {
  return of_layers(header, [&](int layer) {
    const std::int64_t rows = rows_seen(header, layer) * header.n_kv_heads;
    return kv_bytes(header, layer, rows, rows);
  });
}

/// Returns the reasons for which `kvzap run --resume` refuses the file, or an empty list if it
/// accepts the file.
std::vector<std::string> obstacles_to_resuming(const SnapshotHeader& header) {
  std::vector<std::string> why;
  if (header.content != SnapshotContent::all) why.emplace_back("no keys and values");
  if (header.info.token_ids.empty()) why.emplace_back("no token ids");
  if (header.info.options.empty() || header.info.run_state.empty()) {
    why.emplace_back("written by no run of kvzap");
  }
  return why;
}

// --- for people

template <class... Values>
std::string joined(const Values&... values) {
  std::string text;
  const auto add = [&](const std::string& part) {
    if (!part.empty()) text += (text.empty() ? "" : ", ") + part;
  };
  (add(values), ...);
  return text;
}

std::string attribute_text(const SnapshotAttribute& value) {
  return std::visit([](const auto& held) { return fmt::format("{}", held); }, value);
}

std::string policy_text(const SnapshotHeader& header) {
  const auto& info = header.info;
  const auto further = [&](const char* name, const char* before) {
    const auto found = info.further.find(name);
    return found == info.further.end() ? std::string() : before + attribute_text(found->second);
  };
  if (info.prune == "none") return "none: every pair was kept";
  const std::string policy = further("policy", "");
  const std::string surrogate = further("surrogate", "surrogate ");
  const std::string budget = further("budget", "");
  return joined(policy, surrogate, "prune " + info.prune,
                budget.empty() ? fmt::format("threshold {:.3f}", info.threshold) : budget,
                fmt::format("sink {}", info.sink), fmt::format("window {}", header.window),
                further("prefill", "prefill "));
}

/// Formats the recorded options as flags, including options at their defaults.
std::string options_text(const std::string& recorded) {
  if (recorded.empty()) return "not recorded";
  std::string text;
  try {
    const nlohmann::json options = files::parse_json(recorded, "options");
    if (!options.is_object()) return "not an object of options";
    for (const auto& [name, value] : options.items()) {
      if (value == false || (value.is_string() && value.get_ref<const std::string&>().empty())) {
        continue;
      }
      text += fmt::format("{}--{}", text.empty() ? "" : " ", name);
      if (value != true) {
        text += " " + (value.is_string() ? value.get<std::string>() : value.dump());
      }
    }
  } catch (const Error& error) {
    return error.what();
  }
  return text;
}

std::string tokens_text(const SnapshotHeader& header) {
  const auto& info = header.info;
  const std::int64_t tokens = tokens_seen(header);
  std::string text = fmt::format("{}", tokens);
  if (!info.token_ids.empty()) {
    text += tokens < info.context_tokens
                ? fmt::format(" of a context of {}", info.context_tokens)
                : fmt::format(": context {}, question and answer {}", info.context_tokens,
                              tokens - info.context_tokens);
  } else {
    text += " (their ids are not recorded)";
  }
  if (removed_tokens(header) != 0) {
    text += fmt::format("; positions closed up to {} (+rerotate)", header.tokens);
  }
  return text;
}

std::string content_text(const SnapshotHeader& header) {
  std::string text = "positions";
  if (header.content != SnapshotContent::positions) text += ", scores";
  if (header.content == SnapshotContent::all) {
    text += fmt::format(", keys and values ({})", name_of(header.format, header.dtype));
  }
  if (header.has_recent_queries) text += ", recent queries";
  if (header.compress > 0) text += fmt::format("; compressed (deflate, level {})", header.compress);
  return text;
}

std::string bytes_text(const SnapshotHeader& header) {
  return fmt::format("file {}; keys and values {}{} of {} without eviction{}",
                     human_bytes(header.file_bytes),
                     header.content == SnapshotContent::all ? "" : "(not in it) ",
                     human_bytes(kept_bytes(header)), human_bytes(full_bytes(header)),
                     header.format.quantised() ? fmt::format(" in {}", name_of(header.dtype)) : "");
}

std::string table_row(int layer, const std::string& head, const SnapshotHeader& header,
                      const KeptRows& rows, std::int64_t seen) {
  std::string text =
      fmt::format("{:>5} {:>5} {:>9} {:>9} {:>8} {:>8} {:>9}", layer, head, rows.kept,
                  seen - rows.kept, percent(rows.kept, seen), rows.unjudged,
                  human_bytes(kv_bytes(header, layer, rows.kept, rows.unjudged)));
  for (std::size_t i = 0; i < quantile_names.size(); ++i) {
    text += rows.scores ? fmt::format(" {:>9.4g}", (*rows.scores)[i]) : fmt::format(" {:>9}", "-");
  }
  return text + "\n";
}

std::string table_head() {
  std::string text = fmt::format("{:>5} {:>5} {:>9} {:>9} {:>8} {:>8} {:>9}", "layer", "head",
                                 "kept", "evicted", "keep", "unjudged", "KV bytes");
  for (const char* name : quantile_names) text += fmt::format(" {:>9}", name);
  return text + "\n";
}

std::string heading(const SnapshotReader& reader, const std::optional<std::int64_t>& unjudged) {
  const SnapshotHeader& header = reader.header();
  const auto& info = header.info;
  std::string text;
  const auto line = [&](const char* name, const std::string& value) {
    text += fmt::format("{:<10} {}\n", name, printable(value, false));
  };
  line("snapshot", reader.file().string());
  line("format",
       joined(fmt::format("version {}", header.format_version),
              info.kvzap_version.empty() ? "" : "written by kvzap " + info.kvzap_version));
  line("created", info.created.empty() ? "not recorded" : info.created);
  line("model",
       joined(info.model.empty() ? "not recorded" : info.model,
              info.model_hash.empty() ? "hash not recorded" : "hash " + info.model_hash,
              info.tokenizer_hash.empty() ? "" : "tokenizer's hash " + info.tokenizer_hash));
  line("policy", policy_text(header));
  const std::string surrogate = session::further_text(info, session::surrogate_folder_attribute);
  if (!surrogate.empty()) {
    line("surrogate", joined(surrogate, "hash " + session::further_text(
                                                      info, session::surrogate_hash_attribute)));
  }
  line("options", options_text(info.options));
  line("tokens", tokens_text(header));
  line("extents", fmt::format("{} layers, {} KV heads, head_dim {}", header.n_layers,
                              header.n_kv_heads, header.head_dim));
  line("content", content_text(header));
  line("bytes", bytes_text(header));
  const std::int64_t kept = kept_rows(header), all = all_rows(header);
  line("kept", fmt::format("{} of {} pairs (keep ratio {}), {} evicted", kept, all,
                           percent(kept, all), all - kept));
  if (unjudged) {
    line("unjudged",
         fmt::format("{} of the newest pairs, which no threshold has judged yet", *unjudged));
  }
  const auto why = obstacles_to_resuming(header);
  line("resume",
       why.empty()
           ? std::string("possible (kvzap run --resume)") +
                 (header.has_context ? "; has the context's state for further questions" : "")
           : fmt::format("not possible: {}", fmt::join(why, ", ")));
  line("checksums", "those of the data that were read match; --verify checks all");
  return text;
}

// --- for machines

ordered_json json_text(const std::string& text) {
  if (text.empty()) return nullptr;
  try {
    return files::parse_own_json(files::parse_json(text, "attribute").dump());
  } catch (const Error&) {
    return text;
  }
}

ordered_json optional_json(const std::string& text) {
  return text.empty() ? ordered_json() : ordered_json(text);
}

ordered_json rows_json(const SnapshotHeader& header, int layer, const KeptRows& rows,
                       std::int64_t seen) {
  ordered_json json = {{"kept", rows.kept},
                       {"evicted", seen - rows.kept},
                       {"keep_ratio", seen == 0 ? ordered_json()
                                                : ordered_json(static_cast<double>(rows.kept) /
                                                               static_cast<double>(seen))},
                       {"kv_bytes", kv_bytes(header, layer, rows.kept, rows.unjudged)},
                       {"unjudged", rows.unjudged},
                       {"unscored", rows.unscored}};
  json["scores"] = quantiles_json(rows.scores);
  return json;
}

ordered_json header_json(const SnapshotReader& reader, const std::string& version) {
  const SnapshotHeader& header = reader.header();
  const auto& info = header.info;
  const auto why = obstacles_to_resuming(header);
  ordered_json json = {{"format", "kvzap.inspect"},
                       {"format_version", 1},
                       {"version", version},
                       {"file", reader.file().string()},
                       {"snapshot_version", header.format_version},
                       {"kvzap_version", optional_json(info.kvzap_version)},
                       {"created", optional_json(info.created)},
                       {"model",
                        {{"path", info.model},
                         {"hash", optional_json(info.model_hash)},
                         {"tokenizer_hash", optional_json(info.tokenizer_hash)},
                         {"layers", header.n_layers},
                         {"kv_heads", header.n_kv_heads},
                         {"head_dim", header.head_dim}}},
                       {"content", name_of(header.content)},
                       {"dtype", name_of(header.dtype)},
                       {"kv_type", name_of(header.format, header.dtype)},
                       {"compress", header.compress},
                       {"window", header.window},
                       {"page_rows", header.page_rows},
                       {"prune", info.prune},
                       {"threshold", number_json(info.threshold)},
                       {"sink", info.sink}};
  json["attributes"] = ordered_json::object();
  for (const auto& [name, value] : info.further) {
    json["attributes"][name] = std::visit(
        [](const auto& held) {
          if constexpr (std::is_same_v<std::decay_t<decltype(held)>, double>) {
            return number_json(held);
          } else {
            return ordered_json(held);
          }
        },
        value);
  }
  json["options"] = json_text(info.options);
  json["run_state"] = json_text(info.run_state);
  json["state"] = info.state;
  json["tokens"] = tokens_seen(header);
  json["next_position"] = header.tokens;
  json["known_tokens"] = info.token_ids.size();
  json["context_tokens"] =
      info.token_ids.empty() ? ordered_json() : ordered_json(info.context_tokens);
  json["can_resume"] = why.empty();
  json["cannot_resume_because"] = why;
  json["has_context_state"] = header.has_context;
  json["has_recent_queries"] = header.has_recent_queries;
  json["has_logits"] = !info.logits.empty();
  json["file_bytes"] = header.file_bytes;
  const std::int64_t kept = kept_rows(header), all = all_rows(header);
  json["kv_bytes"] = kept_bytes(header);
  json["full_kv_bytes"] = full_bytes(header);
  json["kept"] = kept;
  json["evicted"] = all - kept;
  json["keep_ratio"] = all == 0
                           ? ordered_json()
                           : ordered_json(static_cast<double>(kept) / static_cast<double>(all));
  return json;
}

// --- views

void show_rows(const InspectOptions& options, const SnapshotReader& reader,
               const std::string& version, Progress& progress) {
  const SnapshotHeader& header = reader.header();
  const HeadSelection selection = select_heads(options.view, reader);
  std::vector<LayerRows> layers;
  for (int i = 0; i < selection.layers; ++i) {
    layers.push_back(read_layer(reader, selection, selection.first_layer + i));
    progress.update("inspect", i + 1, selection.layers);
  }
  progress.clear();
  std::optional<std::int64_t> unjudged;
  if (selection.is_all()) {
    unjudged = 0;
    for (const LayerRows& layer : layers) *unjudged += layer.all.unjudged;
  }
  if (options.view.json) {
    ordered_json json = header_json(reader, version);
    if (unjudged) json["unjudged"] = *unjudged;
    json["layers"] = ordered_json::array();
    for (const LayerRows& layer : layers) {
      ordered_json one = {{"layer", layer.layer}};
      const std::int64_t seen = rows_seen(header, layer.layer);
      if (selection.all_heads) {
        one.update(rows_json(header, layer.layer, layer.all, selection.heads * seen));
      }
      one["heads"] = ordered_json::array();
      for (int i = 0; i < selection.heads; ++i) {
        ordered_json head = {{"head", selection.first_head + i}};
        head.update(rows_json(header, layer.layer, layer.heads[i], seen));
        one["heads"].push_back(std::move(head));
      }
      json["layers"].push_back(std::move(one));
    }
    write_whole("-", files::json_lines(json));
    return;
  }
  std::string text = heading(reader, unjudged) + "\n" + table_head();
  for (const LayerRows& layer : layers) {
    const std::int64_t seen = rows_seen(header, layer.layer);
    if (selection.all_heads) {
      text += table_row(layer.layer, "all", header, layer.all, selection.heads * seen);
    }
    for (int i = 0; i < selection.heads; ++i) {
      text += table_row(layer.layer, fmt::format("{}", selection.first_head + i), header,
                        layer.heads[i], seen);
    }
  }
  write_whole("-", text);
}

void show_text(const InspectOptions& options, const SnapshotReader& reader,
               const std::string& version, Progress& progress) {
  const SnapshotHeader& header = reader.header();
  const HeadSelection selection = select_heads(options.view, reader);
  const Tokenizer tokenizer = tokenizer_of(reader, options.view.model);
  require_positions_of_tokens(reader, "--text");
  std::vector<std::int32_t> keeping(header.tokens);  // heads that keep the token
  for (int i = 0; i < selection.layers; ++i) {
    for (int h = 0; h < selection.heads; ++h) {
      count_kept(reader, selection.first_layer + i, selection.first_head + h, keeping);
    }
    progress.update("inspect", i + 1, selection.layers);
  }
  progress.clear();
  const auto& ids = header.info.token_ids;
  const auto kept =
      static_cast<std::int64_t>(keeping.size()) - std::count(keeping.begin(), keeping.end(), 0);
  if (options.view.json) {
    ordered_json json = header_json(reader, version);
    if (!selection.all_layers) json["layer"] = selection.first_layer;
    if (!selection.all_heads) json["head"] = selection.first_head;
    json["looked_at_heads"] = selection.count();
    std::vector<std::string> texts;
    for_each_piece(tokenizer, ids, header.tokens,
                   [&](std::int64_t, const std::string& text) { texts.push_back(text); });
    json["text"] = {{"ids", std::vector<TokenId>(ids.begin(), ids.begin() + header.tokens)},
                    {"texts", std::move(texts)},
                    {"keeping_heads", std::move(keeping)}};
    write_whole("-", json.dump(-1, ' ', false, ordered_json::error_handler_t::replace) + "\n");
    return;
  }
  const bool color = uses_color(options.view.color);
  say("kvzap: note: {}: {} of {} tokens are kept{}; {}\n", selection.text(), kept, header.tokens,
      selection.count() == 1 ? "" : " by any head",
      color ? "the others are dimmed" : "the others are in [~ ~]");
  std::fflush(stderr);
  MarkedText output(color);
  std::int32_t kept_parts = 0;  // of the character that ends with this token
  for_each_piece(tokenizer, ids, header.tokens, [&](std::int64_t i, const std::string& text) {
    kept_parts += keeping[i];
    if (text.empty()) return;
    output.append(text, kept_parts != 0 ? Mark::plain : Mark::dim);
    kept_parts = 0;
  });
  output.finish();
}

void verify(const InspectOptions& options, const std::string& version, Progress& progress) {
  const SnapshotReader reader(options.file);
  const std::vector<std::string> damage =
      reader.verify([&](int layer, int layers) { progress.update("verify", layer, layers); });
  progress.clear();
  if (options.view.json) {
    const ordered_json json = {{"format", "kvzap.verify"},
                               {"format_version", 1},
                               {"version", version},
                               {"file", options.file},
                               {"snapshot_version", reader.header().format_version},
                               {"file_bytes", reader.header().file_bytes},
                               {"whole", damage.empty()},
                               {"damage", damage}};
    write_whole("-", files::json_lines(json));
  } else if (damage.empty()) {
    write_whole(
        "-", fmt::format("{}: whole: every checksum of its {} matches\n",
                         printable(options.file, false), human_bytes(reader.header().file_bytes)));
  } else {
    for (const std::string& sentence : damage) {
      write_whole("-", printable(sentence, false) + "\n");
    }
  }
  flush_stdout();
  if (!damage.empty()) {
    throw Error(fmt::format("snapshot {}: damaged in {} place{}", options.file, damage.size(),
                            damage.size() == 1 ? "" : "s"));
  }
}

void check_inspect(const InspectOptions& o) {
  check_view(o.view);
  require(!o.verify || (!o.view.text && !o.view.layer && !o.view.head),
          "--verify checks the whole file: leave out --text, --layer and --head");
}

}  // namespace

void declare(CLI::App& app, InspectOptions& o) {
  app.add_option(
         "FILE", o.file,
         "snapshot written by kvzap run, GGUF file, or folder of a model or surrogate. Of a "
         "model: shape, types of its tensors, bytes of keys and values, contexts that fit "
         "this machine")
      ->required()
      ->type_name("FILE");
  app.add_flag("--verify", o.verify,
               "check all checksums: print a line for each damaged part, and exit with status 1 if "
               "there is one");
  declare_view(app, o.view,
               "print the text and mark tokens that none of the chosen heads keeps: dimmed on a "
               "terminal, elsewhere between [~ and ~]");
}

void inspect(const InspectOptions& options, const Communicator& comm, const std::string& version) {
  agree_on_usage_of_root(comm, [&] {
    check_inspect(options);
    const std::string model = model::find_model(options.file);
    if (is_model(model)) {
      const ViewOptions& view = options.view;
      require(!options.verify && !view.text && !view.layer && !view.head,
              fmt::format("{}: is a model; --verify, --text, --layer and --head are for snapshots",
                          options.file));
      inspect_model(model, view.json, version);
      return flush_stdout();
    }
    std::error_code ignored;
    const bool is_folder = std::filesystem::is_directory(model, ignored);
    const bool is_there = std::filesystem::exists(model, ignored);
    const std::string hint = is_folder ? model::download_hint(model) : model::name_hint(model);
    if (is_folder || (!is_there && !hint.empty())) {
      throw Error(fmt::format(
          "{}: {}; expected a snapshot, a GGUF file, or the folder of a model or surrogate{}",
          model, is_folder ? "is a folder without config.json or *.gguf" : "no such file or folder",
          hint));
    }
    Progress progress(true, options.view.progress);
    if (options.verify) return verify(options, version, progress);
    const SnapshotReader reader = open_to_view(options.file);
    if (options.view.text) {
      show_text(options, reader, version, progress);
    } else {
      show_rows(options, reader, version, progress);
    }
    flush_stdout();
  });
}

}  // namespace kvzap::driver
