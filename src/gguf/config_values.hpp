// The metadata of a GGUF file from which config.json is made.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "gguf/architectures.hpp"
#include "gguf/gguf_file.hpp"

namespace kvzap::gguf {

/// Reads keys of the file's architecture, named without it: "block_count" for "llama.block_count".
/// Remembers the keys that were read, to refuse the others. Its functions throw Error as those of
/// Metadata.
class ConfigValues {
 public:
  static constexpr std::int64_t max_extent = 2147483647;

  ConfigValues(const GgufFile& file, const Architecture& architecture)
      : m_file(file), m_architecture(architecture) {}

  const GgufFile& file() const { return m_file; }
  const Metadata& metadata() const { return m_file.metadata(); }
  const Architecture& architecture() const { return m_architecture; }
  bool has_tensor(std::string_view name) const { return m_file.find(name) != nullptr; }

  /// Returns the key's whole name.
  std::string own(std::string_view key) const;
  bool was_read(std::string_view key) const { return m_read.count(key) != 0; }

  std::optional<std::int64_t> find_integer(std::string_view key, std::int64_t least,
                                           std::int64_t most = max_extent);
  std::int64_t integer(std::string_view key, std::int64_t least, std::int64_t most = max_extent);
  std::optional<double> find_number(std::string_view key);
  /// A number above 0.
  double positive(std::string_view key);
  /// A factor of values; `absent` if the file has none or 0.
  double factor(std::string_view key, double absent);
  std::optional<bool> find_flag(std::string_view key);
  std::optional<std::string_view> find_string(std::string_view key);

  /// A whole number above 0, or an array with this number for each of `blocks` blocks.
  std::optional<std::int64_t> find_uniform(std::string_view key, std::int64_t blocks);
  std::int64_t uniform(std::string_view key, std::int64_t blocks);
  /// An array of `count` whole numbers of at least 0.
  std::optional<std::vector<std::int64_t>> find_integers(std::string_view key, std::int64_t count);

  /// Returns whether the key is there and holds an array.
  bool has_array(std::string_view key) const {
    const MetadataValue* const value = metadata().find(own(key));
    return value != nullptr && value->type == ValueType::array;
  }
  /// An array with a flag for each of `blocks` blocks.
  std::vector<bool> flags(std::string_view key, std::int64_t blocks);

  /// Throws Error if the key is there with another value, which the architecture cannot have.
  void require(std::string_view key, std::int64_t value);
  void require(std::string_view key, bool value);

  [[noreturn]] void fail(std::string_view key, std::string_view expected,
                         std::string_view found) const;

 private:
  std::string read(std::string_view key);

  const GgufFile& m_file;
  const Architecture& m_architecture;
  std::set<std::string, std::less<>> m_read;
};

/// Sizes that several parts of config.json need.
struct ConfigSizes {
  /// Layers of the model.
  std::int64_t layers = 0;
  /// Layers and blocks for the prediction of further tokens (MTP), which are not part of a model.
  std::int64_t blocks = 0;
  std::int64_t head_dim = 0;
  /// Values of a head that RoPE turns.
  std::int64_t rotary_dim = 0;
  std::int64_t context = 0;
};

/// The biases of a model's maps.
struct ConfigBiases {
  bool qkv = false;
  bool output = false;
  bool feed_forward = false;
  /// Of the router and of all experts.
  bool experts = false;
};

/// Adds the fields that not all architectures have. Returns the biases that the fields announce.
ConfigBiases add_architecture_fields(ConfigValues& values, const ConfigSizes& sizes,
                                     nlohmann::json& config);

/// Adds rope_theta, and rope_scaling if RoPE is scaled.
void add_rope_fields(ConfigValues& values, const ConfigSizes& sizes, nlohmann::json& config);

}  // namespace kvzap::gguf
