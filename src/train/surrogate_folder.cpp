#include "train/surrogate_folder.hpp"

#include <fmt/format.h>

#include <cmath>
#include <kvzap/engine/thresholds.hpp>
#include <nlohmann/json.hpp>

#include "files/json_file.hpp"
#include "files/temporary_file.hpp"
#include "model/safetensors_writer.hpp"
#include "train/checkpoint.hpp"

namespace kvzap {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

ordered_json training_fields(const TrainingOptions& o, const PairsInfo& info) {
  ordered_json fields = {{"kind", o.mlp ? "mlp" : "linear"}};
  if (o.mlp) {
    const MlpOptions& m = o.mlp_options;
    fields["hidden"] = m.hidden > 0 ? m.hidden : std::max<std::int64_t>(1, info.hidden_size / 8);
    fields["epochs"] = m.epochs;
    fields["lr"] = m.learning_rate;
    fields["batch"] = m.batch;
    fields["weight_decay"] = m.weight_decay;
    fields["clip"] = m.clip;
  } else {
    fields["ridge"] = o.ridge.alpha;
  }
  fields["validation"] = o.validation;
  fields["seed"] = o.seed;
  fields["model"] = info.model;
  fields["pairs_dtype"] = std::string(name_of(info.dtype));
  fields["hidden_size"] = info.hidden_size;
  fields["layers"] = info.layers;
  fields["kv_heads"] = info.kv_heads;
  fields["pairs"] = info.pairs;
  fields["texts"] = info.texts;
  if (!info.command.empty()) fields["collected_by"] = info.command;
  return fields;
}

double mean_r2(const std::vector<LayerReport>& layers) {
  double sum = 0;
  std::int64_t count = 0;
  for (const LayerReport& layer : layers) {
    for (const double r2 : layer.r2) {
      if (std::isfinite(r2)) {
        sum += r2;
        ++count;
      }
    }
  }
  return count > 0 ? sum / static_cast<double>(count) : std::nan("");
}

std::string number(double value, int digits) {
  return std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : "-";
}

std::string model_card(const TrainingReport& report, const TrainingOptions& o,
                       const PairsInfo& info) {
  std::string card = fmt::format(
      "---\nlibrary_name: kvpress\ntags:\n- kvzap\n---\n\n"
      "# KVzap surrogate for {}\n\n"
      "It predicts from the hidden state that enters attention how important a token's key-value "
      "pair is for each KV head: the logarithm of its KVzip+ score (KVzap, arXiv 2601.07891). One "
      "{} for each of {} layers, {} inputs, {} outputs.\n\n"
      "`kvzap run --surrogate` and kvpress' `KVzapModel.from_pretrained` read this folder.\n\n"
      "## How it was made\n\n",
      !o.model_name.empty() ? o.model_name
      : info.model.empty()  ? "a model"
                            : info.model,
      o.mlp ? "Linear-GELU-Linear" : "linear map with bias", info.layers, info.hidden_size,
      info.kv_heads);
  if (!o.command.empty()) card += fmt::format("```sh\n{}\n```\n\n", o.command);
  card += fmt::format("kvzap {}, pairs of `{}`:\n\n", o.version, o.pairs_file);
  card += "| | |\n| --- | --- |\n";
  const ordered_json fields = training_fields(o, info);
  for (const auto& [name, value] : fields.items()) {
    if (value.is_object()) continue;
    card += fmt::format("| {} | {} |\n", name,
                        value.is_string() ? value.get<std::string>() : value.dump());
  }
  card += fmt::format(
      "\n## How good it is\n\n"
      "Squared Pearson correlation of prediction and oracle, by KV head, and mean squared error, "
      "on "
      "{} validation pairs ({}), after training on {}. Mean over layers and heads: "
      "{}.\n\n",
      report.validation, report.split_by_text ? "whole texts" : "single pairs", report.training,
      number(mean_r2(report.layers), 3));
  card += "| layer |";
  for (int h = 0; h < info.kv_heads; ++h) card += fmt::format(" R² head {} |", h);
  card += " MSE | training MSE | dropped | seconds |\n| ---: |";
  for (int h = 0; h < info.kv_heads + 4; ++h) card += " ---: |";
  card += "\n";
  for (const LayerReport& layer : report.layers) {
    card += fmt::format("| {} |", layer.layer);
    for (const double r2 : layer.r2) card += fmt::format(" {} |", number(r2, 3));
    card += fmt::format(" {} | {} | {} | {:.1f} |\n", number(layer.mse, 4),
                        number(layer.training_mse, 4), layer.dropped, layer.seconds);
  }
  if (!report.warnings.empty()) {
    card += "\n## Warnings\n\n";
    for (const std::string& warning : report.warnings) card += fmt::format("- {}\n", warning);
  }
  return card;
}

}  // namespace

std::string training_json(const TrainingReport& report, const TrainingOptions& options,
                          const PairsInfo& info) {
  ordered_json all = {
      {"format", "kvzap.training"},       {"format_version", 1},
      {"version", options.version},       {"command", options.command},
      {"pairs_file", options.pairs_file}, {"dtype", std::string(name_of(options.dtype))}};
  all["options"] = training_fields(options, info);
  all["training_pairs"] = report.training;
  all["validation_pairs"] = report.validation;
  all["validation_by_text"] = report.split_by_text;
  all["r2_mean"] = mean_r2(report.layers);
  all["seconds"] = report.seconds;
  all["warnings"] = report.warnings;
  all["layers"] = ordered_json::array();
  for (const LayerReport& layer : report.layers) all["layers"].push_back(train::report_json(layer));
  return all.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

namespace train {

std::string describe_training(const TrainingOptions& options, const PairsInfo& info) {
  return files::json_lines(training_fields(options, info));
}

void write_surrogate_folder(const fs::path& folder, const std::vector<SurrogateLayer>& layers,
                            const TrainingReport& report, const TrainingOptions& options,
                            const PairsInfo& info) {
  const bool narrow = options.dtype == DType::bf16;
  std::vector<std::vector<bfloat16>> rounded;
  rounded.reserve(4 * layers.size());
  std::vector<model::SafetensorsEntry> tensors;
  const auto add = [&](std::string name, const std::vector<float>& values,
                       std::vector<std::int64_t> shape) {
    const void* data = values.data();
    if (narrow) {
      data = rounded.emplace_back(values.begin(), values.end()).data();
    }
    tensors.push_back({std::move(name), narrow ? "BF16" : "F32", std::move(shape), data});
  };
  for (std::size_t l = 0; l < layers.size(); ++l) {
    const SurrogateLayer& s = layers[l];
    const std::string name = fmt::format("layers.{}", l);
    if (s.hidden == 0) {
      add(name + ".bias", s.bias1, {s.outputs});
      add(name + ".weight", s.weight1, {s.outputs, s.inputs});
    } else {
      add(name + ".0.bias", s.bias1, {s.hidden});
      add(name + ".0.weight", s.weight1, {s.hidden, s.inputs});
      add(name + ".2.bias", s.bias2, {s.outputs});
      add(name + ".2.weight", s.weight2, {s.outputs, s.hidden});
    }
  }
  // Thresholds of an earlier surrogate do not fit this one. They are removed only after the new
  // surrogate is written.
  std::error_code ignored;
  const fs::path thresholds = ThresholdTable::file_in(folder);
  const fs::path aside = checkpoint_folder(folder) / "training.json.thresholds";
  fs::rename(thresholds, aside, ignored);
  try {
    model::write_safetensors(folder / "model.safetensors", tensors, {{"format", "pt"}},
                             "surrogate");
  } catch (...) {
    fs::rename(aside, thresholds, ignored);
    throw;
  }

  ordered_json config = {{"architectures", {"KVzapModel"}},
                         {"dtype", narrow ? "bfloat16" : "float32"}};
  if (layers.empty() || layers.front().hidden == 0) {
    config["hidden_dim"] = nullptr;
  } else {
    config["hidden_dim"] = layers.front().hidden;
  }
  config["input_dim"] = info.hidden_size;
  config["model_type"] = "kvzap";
  config["n_modules"] = info.layers;
  config["output_dim"] = info.kv_heads;
  files::write_text(folder / "config.json", files::json_lines(config));
  files::write_text(folder / "README.md", model_card(report, options, info));
  files::write_text(folder / "training.json", training_json(report, options, info));
}

}  // namespace train
}  // namespace kvzap
