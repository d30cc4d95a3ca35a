#include "train/checkpoint.hpp"

#include <fmt/format.h>

#include <cmath>
#include <kvzap/model/safetensors.hpp>
#include <limits>

#include "files/json_field.hpp"
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

// JSON has no NaN: the writer stores null.
double number_of(const files::JsonField& field) {
  return field.is_null() ? std::numeric_limits<double>::quiet_NaN() : field.number();
}

template <class Number>
std::vector<Number> numbers_of(const files::JsonField& list) {
  std::vector<Number> numbers(list.array_size());
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    numbers[i] = static_cast<Number>(number_of(list.element(i)));
  }
  return numbers;
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

LayerReport report_from_json(const files::JsonField& value) {
  LayerReport r;
  r.layer = static_cast<int>(value.member("layer").integer(0, std::numeric_limits<int>::max()));
  r.r2 = numbers_of<double>(value.member("r2"));
  r.mse = number_of(value.member("mse"));
  r.mse_of_head = numbers_of<double>(value.member("mse_of_head"));
  r.training_mse = number_of(value.member("training_mse"));
  r.seconds = number_of(value.member("seconds"));
  r.training = value.member("training_pairs").integer(0);
  r.validation = value.member("validation_pairs").integer(0);
  r.dropped = value.member("dropped_pairs").integer(0);
  r.condition = number_of(value.member("condition"));
  r.epoch_mse = numbers_of<double>(value.member("epoch_mse"));
  const files::JsonField sample = value.member("sample");
  const auto read_rows = [&](const char* name, std::vector<float>& values) {
    const files::JsonField rows = sample.member(name);
    for (std::size_t i = 0; i < rows.array_size(); ++i) {
      const std::vector<float> row = numbers_of<float>(rows.element(i));
      values.insert(values.end(), row.begin(), row.end());
    }
  };
  read_rows("oracle", r.oracle);
  read_rows("predicted", r.predicted);
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
    const nlohmann::json content = files::parse_json(
        {reinterpret_cast<const char*>(description->data), description->bytes}, what);
    const files::JsonField value(content, "description");
    if (value.member("layer").integer() != layer) throw Error("belongs to another layer");
    if (value.member("done").boolean()) {
      TrainedLayer trained;
      SurrogateLayer& s = trained.surrogate;
      s.inputs = value.member("inputs").integer(0);
      s.hidden = value.member("hidden").integer(0);
      s.outputs = value.member("outputs").integer(0);
      s.weight1 = floats_of(files, "weight1");
      s.bias1 = floats_of(files, "bias1");
      s.weight2 = floats_of(files, "weight2");
      s.bias2 = floats_of(files, "bias2");
      trained.report = report_from_json(value.member("report"));
      checkpoint.trained = std::move(trained);
    } else {
      MlpTrainer::State s;
      s.epoch = value.member("epoch").integer(0);
      s.batch = value.member("batch").integer(0);
      s.step = value.member("step").integer(0);
      s.loss = number_of(value.member("loss"));
      s.seconds = value.member("seconds").number();
      s.epoch_mse = numbers_of<double>(value.member("epoch_mse"));
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
