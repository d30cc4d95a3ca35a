#include "model/convert_model.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <kvzap/model/model_config.hpp>
#include <kvzap/model/tokenizer.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "files/json_file.hpp"
#include "files/temporary_file.hpp"
#include "gguf/model_file.hpp"
#include "gguf/type_mixture.hpp"
#include "model/gguf_metadata.hpp"
#include "model/quantise_model.hpp"
#include "model/read_weights.hpp"
#include "model/safetensors_writer.hpp"
#include "model/weight_store.hpp"

namespace kvzap::model {

namespace fs = std::filesystem;

namespace {

constexpr std::int64_t piece_values = std::int64_t{1} << 20;

std::vector<bfloat16> rounded(const std::vector<float>& values) {
  std::vector<bfloat16> result;
  result.reserve(values.size());
  for (const float value : values) result.emplace_back(value);
  return result;
}

/// Calls `take` with all values of a tensor, in pieces of whole rows.
template <class Take>
void for_each_piece(const StoredTensor& tensor, const std::vector<std::int64_t>& shape,
                    const Take& take) {
  const std::int64_t columns = shape.empty() ? 1 : shape.back();
  std::int64_t rows = 1;
  for (std::size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  const std::int64_t step = std::max<std::int64_t>(1, piece_values / columns);
  std::vector<float> values;
  for (std::int64_t first = 0; first < rows; first += step) {
    const std::int64_t end = std::min(rows, first + step);
    values.resize(static_cast<std::size_t>((end - first) * columns));
    tensor.read(first, end, 0, columns, values.data());
    take(values);
  }
  tensor.release();
}

/// Returns whether checkpoints hold the tensor as F32: rounding would choose other experts, or
/// change the decays of delta nets.
bool keeps_f32(const std::string& name) {
  const auto has = [&](const char* part) { return name.find(part) != name.npos; };
  return has("e_score_correction_bias") || has(".expert_bias") || has(".A_log");
}

}  // namespace

void refuse_existing(const fs::path& target) {
  std::error_code ignored;
  if (fs::exists(fs::symlink_status(target, ignored))) {
    throw Error(fmt::format("{}: exists already; expected a new name", target.string()));
  }
}

ModelCheck check_to_run(const fs::path& model) {
  ModelCheck found;
  try {
    ModelConfig config = ModelConfig::load(model);
    found.warnings = std::move(config.warnings);
    if (gguf::has_model_file(model, "tokenizer.json")) Tokenizer::load(model);
    const auto store = open_weights(model);
    for (const NamedTensor& tensor : tensors_of(config)) store->at(tensor.name, tensor.shape);
  } catch (const Error& error) {
    found.refusal = error.what();
  }
  return found;
}

std::vector<std::string> write_gguf(const fs::path& folder, const fs::path& file,
                                    const ConvertProgress& progress) {
  return quantise_model(folder, file, *gguf::find_type_mixture("BF16"), progress).warnings;
}

void write_folder(const fs::path& file, const fs::path& folder, const ConvertProgress& progress) {
  refuse_existing(folder);
  const ModelConfig config = ModelConfig::load(file);
  const auto store = open_weights(file);
  std::int64_t done = 0, total = 0;
  std::vector<SafetensorsEntry> entries;
  for (const NamedTensor& tensor : tensors_of(config)) {
    store->at(tensor.name, tensor.shape);  // throws before anything is written
    const bool is_wide = keeps_f32(tensor.name);
    total += std::accumulate(tensor.shape.begin(), tensor.shape.end(), std::int64_t{1},
                             std::multiplies<>());
    SafetensorsEntry entry{tensor.name, is_wide ? "F32" : "BF16", tensor.shape};
    entry.write = [&, tensor, is_wide](const SafetensorsEntry::Sink& sink) {
      const auto stored = store->at(tensor.name, tensor.shape);
      for_each_piece(*stored, tensor.shape, [&](const std::vector<float>& values) {
        done += static_cast<std::int64_t>(values.size());
        if (progress) progress(done, total);
        if (is_wide) return sink(values.data(), values.size() * sizeof(float));
        const std::vector<bfloat16> narrow = rounded(values);
        sink(narrow.data(), narrow.size() * sizeof(bfloat16));
      });
    };
    entries.push_back(std::move(entry));
  }
  const std::vector<const char*> names = {"config.json", "generation_config.json", "tokenizer.json",
                                          "tokenizer_config.json"};
  std::vector<std::optional<gguf::ModelFile>> files = {read_config(file)};
  for (std::size_t i = 1; i < names.size(); ++i) {
    files.push_back(gguf::read_model_file(file, names[i]));
  }
  files.front()->content["torch_dtype"] = "bfloat16";
  files::make_folder(folder, [&](const fs::path& made) {
    write_safetensors(made / "model.safetensors", entries, {{"format", "pt"}});
    for (std::size_t i = 0; i < names.size(); ++i) {
      if (files[i]) files::write_text(made / names[i], files::json_lines(files[i]->content));
    }
  });
}

}  // namespace kvzap::model
