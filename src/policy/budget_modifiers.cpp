// Modifiers that change the number of rows that stay and the rows that compete: ada, global,
// pyramid, per-layer, chunkkv, dms. Also rerotate, which changes the positions of the rows that
// stay.
#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "files/ascii.hpp"
#include "files/decimal.hpp"
#include "files/json_file.hpp"
#include "files/quote.hpp"
#include "files/text_file.hpp"
#include "policy/registry.hpp"

namespace kvzap::policy {
namespace {

constexpr const char* alpha_help = "minimum share of a head's even budget that each head keeps";

struct AdaParameters : PolicyParameters {
  double alpha = number("alpha", 0.2, {0, 1}, alpha_help);
};

struct GlobalParameters : PolicyParameters {
  double alpha = number("alpha", 0, {0, 1}, alpha_help);
};

struct PyramidShape : PolicyParameters {
  std::int64_t window =
      integer("window", 64, {0, 1 << 24},
              "minimum rows of a layer; if the last would keep fewer, all keep the same");
  double beta = number("beta", 20, {1, 1e6}, "steepness: the last layer keeps 1/beta of the mean");
};

struct PerLayerParameters : PolicyParameters {
  std::string ratios =
      file("ratios", "", "file with one evict ratio per layer, one per line or a JSON list");
};

struct ChunkKvParameters : PolicyParameters {
  std::int64_t length = integer("length", 20, {1, 1 << 24}, "tokens of a group");
  std::int64_t spiky =
      integer("spiky", 0, {0, 1 << 24},
              "tokens that stay of an important group in which few tokens have most "
              "of the score; 0: groups are not divided");
};

struct DmsParameters : PolicyParameters {
  std::optional<double> threshold =
      optional_number("threshold", "score below which a row is evicted");
};

void need_budget(const PolicyChoice& choice, const char* name, const char* why) {
  if (choice.budget.has_amount()) return;
  throw Error(
      fmt::format("{} {}; give an evict ratio, a number of tokens or a size instead of a threshold",
                  name, why));
}

// If `condition` holds, throws Error that modifier `name` has no meaning here.
void refuse(bool condition, const char* name, const std::string& why) {
  if (condition) throw Error(fmt::format("{} has no meaning here: {}", name, why));
}

// Reads ratios from a text file with one per line, or from a JSON list.
std::vector<double> read_ratios(const std::string& file, const PolicySetup& setup) {
  if (std::filesystem::is_directory(file)) {
    throw Error(
        fmt::format("{}: is a folder; expected a file with an evict ratio per layer", file));
  }
  constexpr std::uintmax_t max_bytes = 1u << 20;
  const std::string text = files::read_text(file, max_bytes);
  std::vector<double> ratios;
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && text[first] == '[') {
    const nlohmann::json list = files::parse_json(text, file);
    for (const auto& entry : list) {
      if (!entry.is_number()) {
        throw Error(fmt::format("{}: entry {} is {}; expected a number", file, ratios.size(),
                                files::described(entry)));
      }
      ratios.push_back(entry.get<double>());
    }
  } else {
    for (const std::string_view word : files::words_of(text)) {
      double ratio = 0;
      if (files::read_real(word, ratio) != files::DecimalFault::none) {
        throw Error(fmt::format("{}: entry {} is \"{}\"; expected a number", file, ratios.size(),
                                files::shown(word)));
      }
      ratios.push_back(ratio);
    }
  }
  for (std::size_t i = 0; i < ratios.size(); ++i) {
    if (!(ratios[i] >= 0 && ratios[i] < 1)) {
      throw Error(
          fmt::format("{}: the evict ratio of layer {} is {}; expected at least 0 and less "
                      "than 1",
                      file, i, ratios[i]));
    }
  }
  if (!setup.has_layers(static_cast<std::int64_t>(ratios.size()))) {
    throw Error(fmt::format("{}: {} evict ratios; the model has {} layers", file, ratios.size(),
                            setup.config.num_hidden_layers));
  }
  return ratios;
}

}  // namespace

/// AdaKV (arXiv 2407.11550), as in kvpress. The rows of all heads of a layer compete for kv_heads
/// times the rows that one head would keep. In each head the best max(1, floor(alpha * that
/// number)) rows are safe (none if alpha is 0). With `pyramid`, which is applied before, the
/// layer's mean decreases with depth (the paper's Ada-PyramidKV). Cost: two selections instead of
/// one, and a copy of the layer's scores.
ModifierInfo ada() {
  ModifierInfo info;
  info.name = "ada";
  info.paper = "AdaKV, arXiv 2407.11550";
  info.effect = "the heads of a layer compete for its budget";
  info.apply_with<AdaParameters>([](PolicyChoice& choice, const auto& p, const PolicySetup&) {
    need_budget(choice, "ada", "divides a budget among heads");
    choice.budget.pool = Budget::Pool::layer;
    choice.budget.counts_pools = false;
    choice.budget.safeguard = p.alpha;
  });
  return info;
}

/// All heads of all layers compete, as kvpress does for KVzip and FastKVzip. Of the model's rows,
/// floor(rows * ratio) are evicted. kvpress has no safeguard there, so alpha is 0 by default.
/// Otherwise it has the meaning of `ada`. Scores must be comparable over layers. Those of policies
/// that normalize by layer are not. Cost: the cache stays whole until the last layer has its
/// scores.
ModifierInfo global() {
  ModifierInfo info;
  info.name = "global";
  info.paper = "as in KVzip, arXiv 2505.23416";
  info.effect = "the heads of all layers compete for the model's budget";
  info.pools_layers = true;
  info.apply_with<GlobalParameters>([](PolicyChoice& choice, const auto& p, const PolicySetup&) {
    need_budget(choice, "global", "divides a budget among layers");
    refuse(choice.budget.pool == Budget::Pool::layer && !choice.budget.counts_pools, "global",
           "with ada the heads of a layer compete, with global the heads of all layers; give one");
    refuse(choice.budget.pyramid, "global",
           "scores decide the rows of a layer, so its budget cannot decrease with depth, too");
    refuse(!choice.budget.layer_ratios.empty(), "global",
           "scores decide the rows of a layer, so it cannot have its own ratio, too");
    choice.budget.pool = Budget::Pool::model;
    choice.budget.counts_pools = true;
    choice.budget.safeguard = p.alpha;
  });
  return info;
}

/// PyramidKV's budget (arXiv 2406.02069) for the scores of any policy, in kvpress' form. Layer l of
/// L keeps round(max - l (max - min) / (L - 1)) rows, where m = tokens (1 - ratio), min = m / beta
/// and max = 2 m - min. If max exceeds tokens - window, it is capped there, and min = 2 m - max. If
/// min is below the window, or these values are out of order, every layer keeps round(m).
///
/// kvpress differs from the paper: it applies the ratio to prompts of any length, and counts the
/// window as part of it. The policy pyramidkv has this budget by default. It loses it under
/// modifiers that kvpress implements as presses over its scores alone (ada, global, critical,
/// chunk, chunkkv, merge, rerotate): add `pyramid` there.
ModifierInfo pyramid() {
  ModifierInfo info;
  info.name = "pyramid";
  info.paper = "PyramidKV, arXiv 2406.02069";
  info.effect = "early layers keep more than late ones";
  info.keeps_shape = true;
  info.apply_with<PyramidShape>([](PolicyChoice& choice, const auto& p, const PolicySetup&) {
    need_budget(choice, "pyramid", "divides a budget among layers");
    refuse(choice.budget.pool == Budget::Pool::model, "pyramid",
           fmt::format("in policy {} all layers compete for one budget", choice.info->name));
    refuse(!choice.budget.layer_ratios.empty(), "pyramid",
           "per-layer gives every layer a ratio already");
    refuse(choice.budget.counts_pools, "pyramid",
           fmt::format("policy {} has a budget for each layer, with the same number of rows",
                       choice.info->name));
    choice.budget.pyramid = true;
    choice.budget.pyramid_window = p.window;
    choice.budget.pyramid_beta = p.beta;
  });
  return info;
}

/// An evict ratio for each layer (kvpress' PerLayerCompressionPress), from a file: one ratio in [0,
/// 1) per line, or a JSON list, for all layers of the model. They are the budget, so no other
/// amount may be given.
ModifierInfo per_layer() {
  ModifierInfo info;
  info.name = "per-layer";
  info.paper = "kvpress' PerLayerCompressionPress";
  info.effect = "every layer has its own evict ratio";
  info.amount = "ratios";
  info.gives_budget = true;
  info.keeps_shape = true;
  info.apply_with<PerLayerParameters>([](PolicyChoice& choice, const auto& p,
                                         const PolicySetup& setup) {
    refuse(choice.budget.has_amount() || !std::isnan(choice.threshold), "per-layer",
           "its file gives the evict ratios; give neither a threshold nor another budget");
    refuse(choice.budget.pyramid, "per-layer",
           fmt::format("the budget of policy {} already decreases with depth", choice.info->name));
    refuse(choice.budget.pool != Budget::Pool::head || choice.budget.counts_pools, "per-layer",
           fmt::format("policy {} has a budget over many heads; it takes one ratio for all",
                       choice.info->name));
    choice.budget.layer_ratios = read_ratios(p.ratios, setup);
    choice.budget.amount = Budget::Amount::evict_ratio;
    double sum = 0;
    for (const double ratio : choice.budget.layer_ratios) sum += ratio;
    choice.budget.evict_ratio = sum / static_cast<double>(choice.budget.layer_ratios.size());
  });
  return info;
}

/// ChunkKV (arXiv 2502.00299), as in kvpress: groups of `length` consecutive rows stay or are
/// evicted together, in all heads of a layer. A group's score is the mean over its rows of the sum
/// over the layer's heads. Of G groups, max(1, floor(G (1 - ratio))) stay; the last group may be
/// shorter. A sequence shorter than one group is pruned row by row. Like kvpress, this omits the
/// paper's reuse of indices over layers. With `spiky` it is kvpress' EntropyGatedChunkKVPress, see
/// divided_groups: each layer then keeps as many rows as it would without groups.
ModifierInfo chunkkv() {
  ModifierInfo info;
  info.name = "chunkkv";
  info.paper = "ChunkKV, arXiv 2502.00299";
  info.effect =
      "groups of consecutive tokens stay or are evicted together, in all heads of a layer";
  info.apply_with<ChunkKvParameters>([](PolicyChoice& choice, const auto& p, const PolicySetup&) {
    need_budget(choice, "chunkkv", "keeps a number of groups of tokens");
    refuse(choice.budget.pool != Budget::Pool::head, "chunkkv",
           "all heads of a layer keep the same tokens, so that heads cannot compete (ada, global, "
           "fastkvzip)");
    refuse(
        choice.budget.chunk != 0, "chunkkv",
        "chunk gives every part of the sequence a budget of its own, chunkkv lets parts compete");
    refuse(choice.scores_are_marked, "chunkkv",
           "critical marks the rows of its first stage with the largest number there is, of which "
           "no mean over a group can be taken");
    refuse(p.spiky >= p.length, "chunkkv:spiky",
           fmt::format("a group has {} tokens, of which {} are all", p.length, p.spiky));
    choice.budget.group = p.length;
    choice.budget.spiky = p.spiky;
  });
  return info;
}

/// A threshold over the scores of any policy (kvpress' DMSPress; inference of Dynamic Memory
/// Sparsification, arXiv 2506.05345, without its trained scores). A row with a score below it is
/// evicted once it has left the window. This equals a threshold given with the policy alone.
ModifierInfo dms() {
  ModifierInfo info;
  info.name = "dms";
  info.paper = "DMS, arXiv 2506.05345";
  info.effect = "a threshold over the policy's scores decides";
  info.amount = "threshold";
  info.judges_rows = true;
  info.keeps_shape = true;
  info.apply_with<DmsParameters>([](PolicyChoice& choice, const auto& p, const PolicySetup&) {
    refuse(choice.budget.has_amount(), "dms",
           "it judges each row by a threshold, but a budget is given");
    if (!p.threshold) return;
    refuse(!std::isnan(choice.threshold), "dms:threshold", "another threshold is given beside it");
    choice.threshold = *p.threshold;
  });
  return info;
}

/// Renumbers the positions of the rows that stay without gaps, and rotates their keys accordingly
/// (kvpress' KeyRerotationPress; FINCH, TACL 2024). Every head of every layer must keep the same
/// number of rows, because a sequence has one length. So only budgets of single heads allow it.
ModifierInfo rerotate() {
  ModifierInfo info;
  info.name = "rerotate";
  info.paper = "FINCH, TACL 2024 (kvpress' KeyRerotationPress)";
  info.effect = "kept rows get positions without gaps, and their keys are rotated to them";
  info.apply = [](PolicyChoice& choice, const PolicyArguments&, const PolicySetup&) {
    need_budget(choice, "rerotate",
                "needs the same number of rows in every head, which a threshold does not give");
    refuse(choice.budget.pool != Budget::Pool::head, "rerotate",
           "heads that compete (ada, global, fastkvzip) keep different numbers of rows, and a "
           "sequence has one length");
    refuse(choice.budget.pyramid || !choice.budget.layer_ratios.empty(), "rerotate",
           "layers keep different numbers of rows (pyramid, per-layer), and a sequence has one "
           "length");
    refuse(choice.budget.group != 0, "rerotate",
           "chunkkv may keep a shorter last group in one layer and not in another");
    if (choice.make()->needs().ages) {
      choice.why_once =
          "it scores rows by their age, which the new positions of rerotate do not tell";
    }
    choice.rerotate = true;
  };
  return info;
}

}  // namespace kvzap::policy
