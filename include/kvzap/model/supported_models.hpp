// What kvzap reads of published models, and how each part was tested.
#pragma once

#include <string>
#include <vector>

namespace kvzap {

/// A format or a feature of models.
struct SupportedPart {
  /// The name in the model's files: "Qwen3ForCausalLM", "Q4_1".
  std::string name;
  /// Where the name stands, or what it includes; may be empty.
  std::string detail;
  /// The tests of this part.
  std::string tested;
  /// Of an architecture: its model_type, and its name in GGUF files, which may be empty.
  std::string model_type = {};
  std::string gguf_name = {};
};

/// Parts of one kind.
struct SupportedKind {
  /// A key without spaces: "architectures".
  std::string key;
  std::string title;
  std::vector<SupportedPart> parts;
};

/// Returns what `Model::load` and `Tokenizer::load` accept. Names come from the tables that the
/// readers use. Allocates; does not communicate.
std::vector<SupportedKind> supported_models();

}  // namespace kvzap
