#include "train/checkpoint.hpp"

#include <fmt/format.h>

#include <cmath>
#include <kvzap/model/safetensors.hpp>
#include <limits>

#include "files/json_fields.hpp"
#include "files/json_file.hpp"
#include "files/temporary_file.hpp"
#include "model/safetensors_writer.hpp"

namespace kvzap::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr const char* kind = "checkpoint";

fs::path layer_file(const fs::path& folder, int layer) {
  return checkpoint_folder(folder) / fmt::format("layer-{}.safetensors", layer);
}

model::SafetensorsEntry float_entry(const char* name, const std::vector<float>& values) {
  return {name, "F32", {static_cast<std::int64_t>(values.size())}, values.data()};
}

void write_layer(const fs::path& file, const ordered_json& description,
                 std::vector<model::SafetensorsEntry> tensors) {
  const std::string text = description.dump();
  tensors.push_back({"description", "U8", {static_cast<std::int64_t>(text.size())}, text.data()});
  model::write_safetensors(file, tensors, {{"format", "kvzap.checkpoint"}}, kind);
}

std::vector<float> floats_of(const SafetensorsFolder& files, const char* name) {
  const TensorInfo* const tensor = files.find(name);
  if (!tensor || tensor->stored_dtype != "F32" || tensor->shape.size() != 1) {
    throw Error(fmt::format("no F32 vector {}", name));
  }
  std::vector<float> values(tensor->bytes / sizeof(float));
  if (!values.empty()) std::memcpy(values.data(), tensor->data, tensor->bytes);
  return values;
}

/// Lists the numbers of a state that is not in tensors.
template <class State, class Visit>
void list_numbers(State& state, Visit& visit) {
  visit("epoch", state.epoch);
  visit("batch", state.batch);
  visit("step", state.step);
  visit("loss", state.loss);
  visit("seconds", state.seconds);
  visit("epoch_mse", state.epoch_mse);
}

/// Lists the extents of a surrogate's layer.
template <class Layer, class Visit>
void list_extents(Layer& layer, Visit& visit) {
  visit("inputs", layer.inputs);
  visit("hidden", layer.hidden);
  visit("outputs", layer.outputs);
}

}  // namespace

fs::path checkpoint_folder(const fs::path& folder) { return folder / "checkpoint"; }

ordered_json report_json(const LayerReport& r) {
  const auto rows = [&](const std::vector<float>& values) {
    ordered_json all = ordered_json::array();
    const std::size_t heads = r.r2.size();
    for (std::size_t i = 0; heads > 0 && i + heads <= values.size(); i += heads) {
      const auto begin = values.begin() + static_cast<std::ptrdiff_t>(i);
      all.push_back(std::vector<float>(begin, begin + static_cast<std::ptrdiff_t>(heads)));
    }
    return all;
  };
  ordered_json report;
  files::JsonWriter writer(report);
  list_measures(r, writer);
  report["sample"] = {{"oracle", rows(r.oracle)}, {"predicted", rows(r.predicted)}};
  return report;
}

LayerReport report_from_json(const files::JsonField& value) {
  LayerReport r;
  files::JsonReader reader(value);
  list_measures(r, reader);
  const files::JsonField sample = value.member("sample");
  const auto read_rows = [&](const char* name, std::vector<float>& values) {
    const files::JsonField rows = sample.member(name);
    for (std::size_t i = 0; i < rows.array_size(); ++i) {
      std::vector<float> row;
      files::JsonReader::read(rows.element(i), row);
      values.insert(values.end(), row.begin(), row.end());
    }
  };
  read_rows("oracle", r.oracle);
  read_rows("predicted", r.predicted);
  return r;
}

void write_checkpoint(const fs::path& folder, int layer, const MlpTrainer::State& s) {
  ordered_json description = {{"layer", layer}, {"done", false}};
  files::JsonWriter writer(description);
  list_numbers(s, writer);
  write_layer(layer_file(folder, layer), description,
              {float_entry("parameters", s.parameters), float_entry("first_moment", s.first_moment),
               float_entry("second_moment", s.second_moment)});
}

void write_checkpoint(const fs::path& folder, int layer, const TrainedLayer& trained) {
  const SurrogateLayer& s = trained.surrogate;
  ordered_json description = {{"layer", layer}, {"done", true}};
  files::JsonWriter writer(description);
  list_extents(s, writer);
  description["report"] = report_json(trained.report);
  write_layer(layer_file(folder, layer), description,
              {float_entry("weight1", s.weight1), float_entry("bias1", s.bias1),
               float_entry("weight2", s.weight2), float_entry("bias2", s.bias2)});
}

LayerCheckpoint read_checkpoint(const fs::path& folder, int layer) {
  const fs::path file = layer_file(folder, layer);
  LayerCheckpoint checkpoint;
  if (!fs::exists(file)) return checkpoint;
  const std::string what = fmt::format("checkpoint {}", file.string());
  const auto files = SafetensorsFolder::open(file);
  try {
    const TensorInfo* const description = files.find("description");
    if (!description) throw Error("no description");
    const nlohmann::json content = files::parse_json(
        {reinterpret_cast<const char*>(description->data), description->bytes}, what);
    const files::JsonField value(content, "description");
    if (value.member("layer").integer() != layer) throw Error("belongs to another layer");
    files::JsonReader reader(value);
    if (value.member("done").boolean()) {
      TrainedLayer trained;
      SurrogateLayer& s = trained.surrogate;
      list_extents(s, reader);
      s.weight1 = floats_of(files, "weight1");
      s.bias1 = floats_of(files, "bias1");
      s.weight2 = floats_of(files, "weight2");
      s.bias2 = floats_of(files, "bias2");
      trained.report = report_from_json(value.member("report"));
      checkpoint.trained = std::move(trained);
    } else {
      MlpTrainer::State s;
      list_numbers(s, reader);
      s.parameters = floats_of(files, "parameters");
      s.first_moment = floats_of(files, "first_moment");
      s.second_moment = floats_of(files, "second_moment");
      checkpoint.state = std::move(s);
    }
  } catch (const std::exception& error) {
    throw Error(fmt::format("{}: damaged: {}; --overwrite starts again", what, error.what()));
  }
  return checkpoint;
}

std::vector<std::string> differences(const ordered_json& there, const ordered_json& here) {
  std::vector<std::string> found;
  const ordered_json absent = "absent";
  for (const auto& [name, value] : here.items()) {
    const ordered_json& other = there.contains(name) ? there.at(name) : absent;
    if (other != value) {
      found.push_back(fmt::format("{}: recorded {}, given {}", name, other.dump(), value.dump()));
    }
  }
  return found;
}

}  // namespace kvzap::train
