#include "model/weight_store.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <system_error>

#include "files/json_file.hpp"
#include "gguf/model_file.hpp"
#include "linalg/host/row_kernels.hpp"
#include "model/gguf_store.hpp"
#include "model/quantised_checkpoint.hpp"
#include "model/text_model.hpp"

namespace kvzap::model {
namespace {

class SafetensorsTensor final : public StoredTensor {
 public:
  /// The rows from first_row on; leading extents of the tensor's shape follow one another.
  SafetensorsTensor(const SafetensorsFolder& files, const TensorInfo& info,
                    std::int64_t first_row = 0)
      : m_files(&files), m_info(&info), m_first_row(first_row) {}

  void read(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
            float* target) const override {
    switch (m_info->dtype) {
      case DType::f32:
        return read_as<float>(row_begin, row_end, begin, end, target);
      case DType::f16:
        return read_as<half>(row_begin, row_end, begin, end, target);
      case DType::bf16:
        return read_as<bfloat16>(row_begin, row_end, begin, end, target);
    }
  }

  std::optional<PlainValues> plain() const override {
    const auto skipped = static_cast<std::size_t>(m_first_row * columns()) * size_of(m_info->dtype);
    return PlainValues{m_info->data + skipped, m_info->dtype};
  }
  std::string description() const override {
    return fmt::format("{}: tensor {}", m_info->file, m_info->name);
  }
  void release() const override { m_files->release(*m_info); }

 private:
  std::int64_t columns() const { return m_info->shape.empty() ? 1 : m_info->shape.back(); }

  template <class Stored>
  void read_as(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
               float* target) const {
    const std::int64_t columns = this->columns();
    const auto values = static_cast<std::size_t>(end - begin);
    std::vector<Stored> row(values);  // aligned, unlike the file
    for (std::int64_t i = m_first_row + row_begin; i < m_first_row + row_end; ++i) {
      std::memcpy(row.data(),
                  m_info->data + static_cast<std::size_t>(i * columns + begin) * sizeof(Stored),
                  values * sizeof(Stored));
      linalg::widen(row.data(), target, end - begin);
      target += end - begin;
    }
  }

  const SafetensorsFolder* m_files;
  const TensorInfo* m_info;
  std::int64_t m_first_row;
};

/// Where a file keeps a matrix of one expert in a tensor of all experts (expert, output, input).
struct InAllExperts {
  std::string name;  // of that tensor
  std::int64_t expert = 0;
  bool has_gate_and_up = false;  // an expert's rows are those of gate, then those of up
  bool is_up = false;
};

/// Returns that place for "….experts.N.gate_proj.weight" and its like; nothing for other names.
std::optional<InAllExperts> in_all_experts(std::string_view name) {
  constexpr std::string_view block = ".experts.";
  const std::size_t found = name.find(block);
  if (found == std::string_view::npos) return std::nullopt;
  const std::size_t number = found + block.size();
  InAllExperts place;
  const auto [end, error] =
      std::from_chars(name.data() + number, name.data() + name.size(), place.expert);
  if (error != std::errc() || place.expert < 0) return std::nullopt;
  const std::string_view matrix = name.substr(static_cast<std::size_t>(end - name.data()));
  place.is_up = matrix == ".up_proj.weight";
  place.has_gate_and_up = place.is_up || matrix == ".gate_proj.weight";
  if (!place.has_gate_and_up && matrix != ".down_proj.weight") return std::nullopt;
  place.name = fmt::format("{}{}", name.substr(0, number),
                           place.has_gate_and_up ? "gate_up_proj" : "down_proj");
  return place;
}

}  // namespace

std::unique_ptr<StoredTensor> SafetensorsStore::at(std::string_view name,
                                                   const std::vector<std::int64_t>& shape) const {
  const auto place = in_all_experts(name);
  const TensorInfo* const all = place ? m_files.find(place->name) : nullptr;
  if (all == nullptr || m_files.find(name) != nullptr || shape.size() != 2) {
    return std::make_unique<SafetensorsTensor>(m_files, m_files.at(name, shape));
  }
  const std::int64_t rows = (place->has_gate_and_up ? 2 : 1) * shape[0];
  const std::int64_t experts = std::max(place->expert + 1, all->shape.empty() ? 0 : all->shape[0]);
  return std::make_unique<SafetensorsTensor>(m_files,
                                             m_files.at(place->name, {experts, rows, shape[1]}),
                                             place->expert * rows + (place->is_up ? shape[0] : 0));
}

bool SafetensorsStore::has(std::string_view name) const { return m_files.find(name) != nullptr; }

std::unique_ptr<WeightStore> open_weights(const std::filesystem::path& model) {
  if (gguf::is_gguf(model)) return std::make_unique<GgufStore>(model);
  SafetensorsFolder files = SafetensorsFolder::open(model);
  const std::filesystem::path file = model / "config.json";
  std::error_code ignored;
  if (std::filesystem::exists(file, ignored)) {
    const nlohmann::json object = files::read_json_object(file);
    ConfigFields fields(object, file.string());
    std::vector<std::string> warnings;  // ModelConfig reports them
    if (const auto config = read_quantised_config(fields, warnings)) {
      return text_of(std::make_unique<QuantisedStore>(std::move(files), *config));
    }
  }
  return text_of(std::make_unique<SafetensorsStore>(std::move(files)));
}

}  // namespace kvzap::model
