#include "train/checkpoint.hpp"

#include <fmt/format.h>

#include <cmath>
#include <kvzap/model/safetensors.hpp>
#include <limits>

#include "base/json_file.hpp"
#include "base/temporary_file.hpp"
#include "model/safetensors_writer.hpp"

namespace kvzap::detail {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr const char* kind = "checkpoint";

fs::path layer_file(const fs::path& folder, int layer) {
  return checkpoint_folder(folder) / fmt::format("layer-{}.safetensors", layer);
}

SafetensorsEntry float_entry(const char* name, const std::vector<float>& values) {
  return {name, "F32", {static_cast<std::int64_t>(values.size())}, values.data()};
}

void write_layer(const fs::path& file, const ordered_json& description,
                 std::vector<SafetensorsEntry> tensors) {
  const std::string text = description.dump();
  tensors.push_back({"description", "U8", {static_cast<std::int64_t>(text.size())}, text.data()});
  write_safetensors(file, tensors, {{"format", "kvzap.checkpoint"}}, kind);
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

// JSON has no NaN.
double number_of(const nlohmann::json& value) {
  return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
}
template <class Number>
std::vector<Number> numbers_of(const nlohmann::json& values) {
  std::vector<Number> numbers;
  for (const nlohmann::json& value : values)
    numbers.push_back(static_cast<Number>(number_of(value)));
  return numbers;
}

// Reads a field of a description. Throws Error, naming the field.
template <class Value>
Value field_of(const nlohmann::json& object, const char* name) {
  const auto found = object.is_object() ? object.find(name) : object.end();
  if (found == object.end()) throw Error(fmt::format("description: {} is missing", name));
  try {
    return found->get<Value>();
  } catch (const nlohmann::json::exception&) {
    throw Error(
        fmt::format("description: {} is {}, a value of another type", name, described(*found)));
  }
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
  return {{"layer", r.layer},
          {"r2", r.r2},
          {"mse", r.mse},
          {"mse_of_head", r.mse_of_head},
          {"training_mse", r.training_mse},
          {"seconds", r.seconds},
          {"training_pairs", r.training},
          {"validation_pairs", r.validation},
          {"dropped_pairs", r.dropped},
          {"condition", r.condition},
          {"epoch_mse", r.epoch_mse},
          {"sample", {{"oracle", rows(r.oracle)}, {"predicted", rows(r.predicted)}}}};
}

LayerReport report_from_json(const nlohmann::json& value) {
  LayerReport r;
  r.layer = value.at("layer").get<int>();
  r.r2 = numbers_of<double>(value.at("r2"));
  r.mse = number_of(value.at("mse"));
  r.mse_of_head = numbers_of<double>(value.at("mse_of_head"));
  r.training_mse = number_of(value.at("training_mse"));
  r.seconds = number_of(value.at("seconds"));
  r.training = value.at("training_pairs").get<std::int64_t>();
  r.validation = value.at("validation_pairs").get<std::int64_t>();
  r.dropped = value.at("dropped_pairs").get<std::int64_t>();
  r.condition = number_of(value.at("condition"));
  r.epoch_mse = numbers_of<double>(value.at("epoch_mse"));
  for (const nlohmann::json& row : value.at("sample").at("oracle")) {
    for (const float number : numbers_of<float>(row)) r.oracle.push_back(number);
  }
  for (const nlohmann::json& row : value.at("sample").at("predicted")) {
    for (const float number : numbers_of<float>(row)) r.predicted.push_back(number);
  }
  return r;
}

void write_checkpoint(const fs::path& folder, int layer, const MlpTrainer::State& s) {
  const ordered_json description = {
      {"layer", layer}, {"done", false},  {"epoch", s.epoch},     {"batch", s.batch},
      {"step", s.step}, {"loss", s.loss}, {"seconds", s.seconds}, {"epoch_mse", s.epoch_mse}};
  write_layer(layer_file(folder, layer), description,
              {float_entry("parameters", s.parameters), float_entry("first_moment", s.first_moment),
               float_entry("second_moment", s.second_moment)});
}

void write_checkpoint(const fs::path& folder, int layer, const TrainedLayer& trained) {
  const SurrogateLayer& s = trained.surrogate;
  const ordered_json description = {
      {"layer", layer},     {"done", true},         {"inputs", s.inputs},
      {"hidden", s.hidden}, {"outputs", s.outputs}, {"report", report_json(trained.report)}};
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
    const nlohmann::json value =
        parse_json({reinterpret_cast<const char*>(description->data), description->bytes}, what);
    if (field_of<int>(value, "layer") != layer) throw Error("belongs to another layer");
    if (field_of<bool>(value, "done")) {
      TrainedLayer trained;
      SurrogateLayer& s = trained.surrogate;
      s.inputs = field_of<std::int64_t>(value, "inputs");
      s.hidden = field_of<std::int64_t>(value, "hidden");
      s.outputs = field_of<std::int64_t>(value, "outputs");
      s.weight1 = floats_of(files, "weight1");
      s.bias1 = floats_of(files, "bias1");
      s.weight2 = floats_of(files, "weight2");
      s.bias2 = floats_of(files, "bias2");
      trained.report = report_from_json(value.at("report"));
      checkpoint.trained = std::move(trained);
    } else {
      MlpTrainer::State s;
      s.epoch = field_of<std::int64_t>(value, "epoch");
      s.batch = field_of<std::int64_t>(value, "batch");
      s.step = field_of<std::int64_t>(value, "step");
      s.loss = number_of(value.at("loss"));
      s.seconds = field_of<double>(value, "seconds");
      s.epoch_mse = numbers_of<double>(value.at("epoch_mse"));
      s.parameters = floats_of(files, "parameters");
      s.first_moment = floats_of(files, "first_moment");
      s.second_moment = floats_of(files, "second_moment");
      checkpoint.state = std::move(s);
    }
  } catch (const std::exception& error) {
    throw Error(fmt::format("{}: damaged: {}; set overwrite to start again", what, error.what()));
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

}  // namespace kvzap::detail
