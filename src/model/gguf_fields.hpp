// The fields of a model in both directions: config.json made of a GGUF file's metadata, and the
// metadata written for a model. A family's rows (gguf_families.cpp) are calls of GgufFields, which
// serve both.
#pragma once

#include <cstdint>
#include <filesystem>
#include <kvzap/model/model_config.hpp>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/architectures.hpp"
#include "gguf/gguf_file.hpp"
#include "gguf/gguf_writer.hpp"

namespace kvzap::model {

/// Reads the metadata of a file, or writes those of a model. Keys are named without the
/// architecture: "block_count" for "llama.block_count". While it reads, functions that write and
/// those that check the model do nothing, and the model is one without meaning. While it writes,
/// functions that read find no key. Errors are those of gguf::Metadata, or name config.json.
class GgufFields {
 public:
  static constexpr std::int64_t max_extent = 2147483647;

  GgufFields(const gguf::GgufFile& file, const gguf::Architecture& of_file);
  GgufFields(const ModelConfig& of_model, const std::filesystem::path& folder,
             const gguf::Architecture& of_file, gguf::GgufWriter& writer);

  const gguf::Architecture& architecture;
  /// The model that is written.
  const ModelConfig& model;
  /// config.json of the file that is read. While writing: the fields of rows, as far as rows need
  /// them.
  nlohmann::json config = nlohmann::json::object();
  std::int64_t layers = 0;
  /// Layers, and blocks for the prediction of further tokens (MTP), which are not part of a model.
  std::int64_t blocks = 0;
  std::int64_t context = 0;
  std::int64_t head_dim = 0;
  /// Values of a head that RoPE turns.
  std::int64_t rotary_dim = 0;
  /// Whether layers have attention, and feed-forward parts, in files that say so; empty: all have.
  std::vector<bool> layers_attend, layers_feed_forward;
  /// The biases of a file. `expert_biases`: of the router and of all experts.
  bool qkv_bias = false, output_bias = false, mlp_bias = false, expert_biases = false;
  /// Those of the norms of the residual stream, of the output head, and of convolutions.
  bool norm_bias = false, head_bias = false, convolution_bias = false;
  /// The model routes tokens to experts; it embeds positions.
  bool has_experts = false, has_positions = false;

  bool reads() const { return m_file != nullptr; }
  /// Returns a field that an earlier row has set.
  std::int64_t size(const char* field) const { return config.at(field).get<std::int64_t>(); }

  // Rows: a key, its field in config.json, and its value in the model.

  /// A whole number in [1, most].
  void integer(const char* key, const char* field, std::int64_t value,
               std::int64_t most = max_extent) {
    exchange(key, field, value, whole(key, 1, most));
  }
  /// A whole number in [0, most]; without the key `absent`.
  void integer_or(const char* key, const char* field, std::int64_t absent, std::int64_t value) {
    exchange(key, field, value, find_integer(key, 0).value_or(absent));
  }
  /// The same whole number above 0 for all blocks; `absent` without the key, if that is not 0.
  void uniform(const char* key, const char* field, std::int64_t value, std::int64_t absent = 0);
  /// A number above 0; `absent` without the key, if that is not 0.
  void positive(const char* key, const char* field, double value, double absent = 0) {
    exchange(key, field, value, absent != 0 && !find_number(key) ? absent : above_0(key));
  }
  /// A factor of values: `absent` without the key, and for 0.
  void factor(const char* key, const char* field, double absent, double value) {
    exchange(key, field, value, find_factor(key, absent));
  }
  /// A number; no field without the key.
  void number(const char* key, const char* field, double value);
  /// true or false; false without the key.
  void flag(const char* key, const char* field, bool value) {
    exchange(key, field, value, m_metadata.find_flag(read(key)).value_or(false));
  }
  /// A setting that the architecture implies.
  void implied(const char* field, const nlohmann::json& value, const nlohmann::json& of_model) {
    config[field] = value;
    demand(field, value, of_model);
  }

  // Parts of rows that are not plain. Reading:

  const gguf::TensorEntry* tensor(std::string_view name) const {
    return reads() ? m_file->find(name) : nullptr;
  }
  /// Returns whether one of the layers has this tensor, "attn_q.bias".
  bool has_in_layers(std::string_view tensor) const;
  const gguf::Metadata& metadata() const { return m_metadata; }
  /// Returns the key's whole name.
  std::string own(std::string_view key) const;
  /// The same, for a reader of Metadata.
  std::string read(std::string_view key) { return own(*m_read.emplace(key).first); }
  bool was_read(std::string_view key) const { return m_read.count(key) != 0; }
  std::optional<std::int64_t> find_integer(std::string_view key, std::int64_t least,
                                           std::int64_t most = max_extent) {
    return m_metadata.find_integer(read(key), least, most);
  }
  std::int64_t whole(std::string_view key, std::int64_t least, std::int64_t most = max_extent) {
    return reads() ? m_metadata.integer(read(key), least, most) : least;
  }
  std::optional<double> find_number(std::string_view key) {
    return m_metadata.find_number(read(key));
  }
  double above_0(std::string_view key);
  double find_factor(std::string_view key, double absent);
  /// The flags of all blocks, or numbers 0 and 1; nothing if the value is no array.
  std::optional<std::vector<bool>> find_flags(std::string_view key);
  std::optional<std::int64_t> find_uniform(std::string_view key);
  /// A number from 0 on for each layer, whether the file has an array or one number for all blocks.
  std::vector<std::int64_t> numbers_of_layers(std::string_view key);
  /// Throws Error unless all of these numbers above 0 are the same. Returns it; 0: there is none.
  std::int64_t common_number(std::string_view key, const std::vector<std::int64_t>& numbers) const;
  /// Throws Error if the key is there with another value, which the architecture cannot have.
  void require_key(std::string_view key, const nlohmann::json& value);
  [[noreturn]] void fail_key(std::string_view key, std::string_view expected,
                             std::string_view found) const {
    m_metadata.fail(own(key), expected, found);
  }

  // Writing:

  /// Adds a flag, a u32, an f32, a string, or an array of flags or i32; nothing for null.
  void add(std::string_view key, const nlohmann::json& value);
  /// Throws Error unless the model has the setting that programs derive from the architecture.
  void require(bool condition, std::string_view field, std::string_view expected,
               std::string_view found) const;
  void demand(std::string_view field, const nlohmann::json& value,
              const nlohmann::json& of_model) const;
  [[noreturn]] void fail(std::string_view field, std::string_view expected,
                         std::string_view found) const;

 private:
  void exchange(const char* key, const char* field, const nlohmann::json& value,
                const nlohmann::json& found) {
    config[field] = reads() ? found : value;
    add(key, value);
  }
  const gguf::GgufFile* m_file = nullptr;
  const gguf::Metadata& m_metadata;
  const std::filesystem::path* m_folder = nullptr;
  gguf::GgufWriter* m_writer = nullptr;
  std::set<std::string, std::less<>> m_read;
};

/// Returns whether the layer, counted from 1, is a multiple of `period`; none is one of 0.
inline bool ends_period(std::int64_t layer, std::int64_t period) {
  return period > 0 && (layer + 1) % period == 0;
}

/// The rows of RoPE.
void rope_fields(GgufFields& fields);
/// Returns whether files of the architecture have a set of factors for longer texts.
bool has_two_rope_factors(const GgufFields& fields);
/// Returns the values of a tensor of factors of RoPE, one for each pair that turns. Throws Error
/// unless it is there, with finite values above 0.
std::vector<float> rope_factors_of(const GgufFields& fields, const char* name);
/// Refuses scaling of RoPE by a tensor of factors, and by yarn unless it `may_be_yarn`: programs do
/// not read them in files of some architectures.
void require_scaling_by_keys(const GgufFields& fields, bool may_be_yarn);
[[noreturn]] void refuse_scaling(const GgufFields& fields);

/// A class of models and its rows, beside those that all have (gguf_metadata.cpp).
struct GgufFamily {
  std::string_view architecture;
  void (*rows)(GgufFields& fields);
  /// Empty: the architecture's first class, and classes without an entry of their own.
  std::string_view class_name = "";
  /// Returns whether a file of the architecture holds such a model.
  bool (*is_in_file)(GgufFields& fields) = nullptr;
};
const std::vector<GgufFamily>& gguf_families();

}  // namespace kvzap::model
