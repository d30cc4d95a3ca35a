#include <fmt/ranges.h>

#include <algorithm>
#include <kvzap/model/supported_models.hpp>
#include <string_view>
#include <utility>

#include "gguf/architectures.hpp"
#include "gguf/block_formats.hpp"
#include "gguf/made_files.hpp"
#include "linalg/quantised/format.hpp"
#include "model/families/family.hpp"
#include "model/supported_names.hpp"

namespace kvzap {
namespace {

/// Tests of parts that differ from those of their neighbours in the list.
constexpr std::pair<std::string_view, std::string_view> tests_of_parts[] = {
    {"default", "runs of all models"},
    {"fp8", "made checkpoints with scales of blocks, rows and tensors, against their values"},
    {"fbgemm_fp8", "made config.json; weights as fp8"},
    {"compressed-tensors", "made config.json (float-quantized); weights as fp8"},
    {"mxfp4", "made checkpoints, against their values"},
    {"awq", "made checkpoints with groups of several sizes, against their values"},
    {"gptq", "made checkpoints of both formats, with and without act-order, against their values"},
};

std::string tests_of(std::string_view name, std::string_view otherwise) {
  const auto* const found = std::find_if(std::begin(tests_of_parts), std::end(tests_of_parts),
                                         [&](const auto& row) { return row.first == name; });
  return std::string(found == std::end(tests_of_parts) ? otherwise : found->second);
}

SupportedKind list_architectures() {
  SupportedKind kind{"architectures", "Architectures", {}};
  for (const model::Family* family : model::families()) {
    const auto* const in_gguf = gguf::architecture_of(family->class_name);
    const std::string gguf_name(in_gguf == nullptr ? "" : in_gguf->name);
    std::string detail = fmt::format("model_type {}", family->model_type);
    if (in_gguf != nullptr) detail += fmt::format("; {} in GGUF", gguf_name);
    kind.parts.push_back({std::string(family->class_name), detail, std::string(family->tested),
                          std::string(family->model_type), gguf_name});
  }
  return kind;
}

SupportedKind list_files() {
  return {"files",
          "Files",
          {{"folder", "config.json, tokenizer.json and *.safetensors, in one file or several",
            "all tests; malformed files and fuzz targets"},
           {"GGUF", "versions 2 and 3, little-endian, in one file or several",
            "made and malformed files, a fuzz target; SmolLM2-135M-Instruct"}}};
}

SupportedKind list_folder_weights() {
  SupportedKind kind{"safetensors_weights", "Weights of folders", {}};
  for (const char* name : {"BF16", "F16", "F32"}) {
    kind.parts.push_back({name, "", "runs of the demo model in each value type"});
  }
  for (const std::string_view method : model::quantisation_methods()) {
    kind.parts.push_back(
        {std::string(method),
         "quant_method; stays in blocks, or is widened at load where its groups do not fit blocks",
         tests_of(method, "")});
  }
  return kind;
}

SupportedKind list_gguf_weights() {
  SupportedKind kind{"gguf_weights", "Weights of GGUF files", {}};
  for (const gguf::BlockFormat& format : gguf::block_formats()) {
    const bool stays = linalg::quantised::find_format(format.name) != nullptr;
    kind.parts.push_back({std::string(format.name),
                          format.values == 1
                              ? ""
                              : fmt::format("blocks of {} values, {}", format.values,
                                            stays ? "which stay" : "widened at load"),
                          "random blocks, bit for bit as the Python package gguf"});
  }
  return kind;
}

SupportedKind list_tokenizers() {
  constexpr const char* in_folder = "tokenizer.json";
  constexpr const char* random = "random files and texts of each kind, as tokenizers 0.23";
  std::string of_gguf =
      fmt::format("tokenizer.ggml.pre: {}", fmt::join(gguf::pre_tokenizer_names(), ", "));
  return {
      "tokenizers",
      "Tokenizers",
      {{"BPE over bytes", in_folder,
        std::string(random) + "; the vocabularies of SmolLM2 and Tekken"},
       {"BPE over characters", "tokenizer.json; byte fallback or an unknown token",
        std::string(random) + "; the vocabularies of Mistral"},
       {"Unigram", in_folder, std::string(random) + "; a model that sentencepiece trained"},
       {"WordPiece, WordLevel", in_folder, random},
       {"tekken.json, tiktoken", "folders without tokenizer.json",
        "the vocabularies of Mistral, as transformers 5.24"},
       {"tokenizer.model", "SentencePiece's BPE and Unigram",
        "the vocabularies of Mistral and models that sentencepiece trained, as transformers 5.24"},
       {"vocab.json, merges.txt", "GPT-2, OPT, Phi, GPT-NeoX, Qwen2",
        "made files, as transformers 5.24"},
       {"gpt2 in GGUF", std::move(of_gguf), "the vocabulary of SmolLM2; made files"},
       {"llama in GGUF", "SentencePiece's BPE with byte fallback", "made files"},
       {"gemma4 in GGUF", "BPE over characters with byte fallback", "made files"}}};
}

SupportedKind list_chat_templates() {
  return {"chat_templates",
          "Chat templates",
          {{"Jinja", "the language of chat templates; user messages must appear once, unchanged",
            "random templates and published ones, as jinja2"}}};
}

SupportedKind list_rope_types() {
  SupportedKind kind{"rope_types", "RoPE scaling", {}};
  for (const std::string_view name : model::rope_type_names()) {
    kind.parts.push_back({std::string(name), "rope_type",
                          tests_of(name, "frequencies of published configs, as transformers 5.2")});
  }
  kind.parts.push_back({"proportional", "rope_type",
                        "Gemma 4: logits and answers equal transformers (random weights)"});
  return kind;
}

}  // namespace

std::vector<SupportedKind> supported_models() {
  return {list_architectures(), list_files(),          list_folder_weights(), list_gguf_weights(),
          list_tokenizers(),    list_chat_templates(), list_rope_types()};
}

}  // namespace kvzap
