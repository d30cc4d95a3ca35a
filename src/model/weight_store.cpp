#include "model/weight_store.hpp"

#include <fmt/format.h>

#include <cstring>
#include <system_error>

#include "base/json_file.hpp"
#include "gguf/model_file.hpp"
#include "linalg/host/row_kernels.hpp"
#include "model/gguf_store.hpp"
#include "model/quantised_checkpoint.hpp"

namespace kvzap::model {
namespace {

class SafetensorsTensor final : public StoredTensor {
 public:
  SafetensorsTensor(const SafetensorsFolder& files, const TensorInfo& info)
      : m_files(&files), m_info(&info) {}

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
    return PlainValues{m_info->data, m_info->dtype};
  }
  std::string description() const override {
    return fmt::format("{}: tensor {}", m_info->file, m_info->name);
  }
  void release() const override { m_files->release(*m_info); }

 private:
  template <class Stored>
  void read_as(std::int64_t row_begin, std::int64_t row_end, std::int64_t begin, std::int64_t end,
               float* target) const {
    const std::int64_t columns = m_info->shape.back();
    const auto values = static_cast<std::size_t>(end - begin);
    std::vector<Stored> row(values);  // aligned, unlike the file
    for (std::int64_t i = row_begin; i < row_end; ++i) {
      std::memcpy(row.data(),
                  m_info->data + static_cast<std::size_t>(i * columns + begin) * sizeof(Stored),
                  values * sizeof(Stored));
      linalg::widen(row.data(), target, end - begin);
      target += end - begin;
    }
  }

  const SafetensorsFolder* m_files;
  const TensorInfo* m_info;
};

/// The text model's tensors in the checkpoint of a model of texts and images.
class TextStore final : public WeightStore {
 public:
  /// Names begin with `from` here and with `to` in `store`; others are the same.
  TextStore(std::unique_ptr<WeightStore> store, std::string_view from, std::string_view to)
      : m_store(std::move(store)), m_from(from), m_to(to) {}

  std::unique_ptr<StoredTensor> at(std::string_view name,
                                   const std::vector<std::int64_t>& shape) const override {
    return m_store->at(stored_name(name), shape);
  }
  bool has(std::string_view name) const override { return m_store->has(stored_name(name)); }

 private:
  std::string stored_name(std::string_view name) const {
    const bool is_renamed = name.substr(0, m_from.size()) == m_from;
    return is_renamed ? fmt::format("{}{}", m_to, name.substr(m_from.size())) : std::string(name);
  }

  std::unique_ptr<WeightStore> m_store;
  std::string_view m_from, m_to;
};

/// Returns `store`, or its text model if it is the store of a model of texts and images. Published
/// checkpoints and those that transformers 5 writes have different names.
std::unique_ptr<WeightStore> text_of(std::unique_ptr<WeightStore> store) {
  if (store->has("language_model.model.embed_tokens.weight")) {
    return std::make_unique<TextStore>(std::move(store), "", "language_model.");
  }
  if (store->has("model.language_model.embed_tokens.weight")) {
    return std::make_unique<TextStore>(std::move(store), "model.", "model.language_model.");
  }
  return store;
}

}  // namespace

std::unique_ptr<StoredTensor> SafetensorsStore::at(std::string_view name,
                                                   const std::vector<std::int64_t>& shape) const {
  return std::make_unique<SafetensorsTensor>(m_files, m_files.at(name, shape));
}

bool SafetensorsStore::has(std::string_view name) const { return m_files.find(name) != nullptr; }

std::unique_ptr<WeightStore> open_weights(const std::filesystem::path& model) {
  if (gguf::is_gguf(model)) return std::make_unique<GgufStore>(model);
  SafetensorsFolder files = SafetensorsFolder::open(model);
  const std::filesystem::path file = model / "config.json";
  std::error_code ignored;
  if (std::filesystem::exists(file, ignored)) {
    const nlohmann::json object = base::read_json_object(file);
    ConfigFields fields(object, file.string());
    std::vector<std::string> warnings;  // ModelConfig reports them
    if (const auto config = read_quantised_config(fields, warnings)) {
      return text_of(std::make_unique<QuantisedStore>(std::move(files), *config));
    }
  }
  return text_of(std::make_unique<SafetensorsStore>(std::move(files)));
}

}  // namespace kvzap::model
