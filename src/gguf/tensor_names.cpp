#include "gguf/tensor_names.hpp"

#include <fmt/format.h>

#include <utility>

namespace kvzap::gguf {
namespace {

using NamePair = std::pair<std::string_view, std::string_view>;  // Hugging Face, GGUF

constexpr NamePair whole_names[] = {{"model.embed_tokens.weight", "token_embd.weight"},
                                    {"model.norm.weight", "output_norm.weight"},
                                    {"lm_head.weight", "output.weight"}};

// Without ".weight" and ".bias".
constexpr NamePair layer_names[] = {
    {"input_layernorm", "attn_norm"},    {"self_attn.q_proj", "attn_q"},
    {"self_attn.k_proj", "attn_k"},      {"self_attn.v_proj", "attn_v"},
    {"self_attn.o_proj", "attn_output"}, {"self_attn.q_norm", "attn_q_norm"},
    {"self_attn.k_norm", "attn_k_norm"}, {"post_attention_layernorm", "ffn_norm"},
    {"mlp.gate_proj", "ffn_gate"},       {"mlp.up_proj", "ffn_up"},
    {"mlp.down_proj", "ffn_down"}};

constexpr std::string_view hugging_face_layers = "model.layers.";
constexpr std::string_view gguf_layers = "blk.";

/// Replaces the names of one naming by those of the other. `from` and `to` choose the members of
/// the pairs.
std::optional<std::string> renamed(std::string_view name, std::string_view NamePair::*from,
                                   std::string_view NamePair::*to, std::string_view from_layers,
                                   std::string_view to_layers) {
  for (const NamePair& pair : whole_names) {
    if (pair.*from == name) return std::string(pair.*to);
  }
  if (name.substr(0, from_layers.size()) != from_layers) return std::nullopt;
  name.remove_prefix(from_layers.size());
  const std::size_t digits = name.find_first_not_of("0123456789");
  const std::size_t kind = name.rfind('.');
  if (digits == 0 || digits == name.npos || name[digits] != '.' || kind <= digits) {
    return std::nullopt;
  }
  const std::string_view suffix = name.substr(kind);
  if (suffix != ".weight" && suffix != ".bias") return std::nullopt;
  const std::string_view own = name.substr(digits + 1, kind - digits - 1);
  for (const NamePair& pair : layer_names) {
    if (pair.*from != own) continue;
    return fmt::format("{}{}.{}{}", to_layers, name.substr(0, digits), pair.*to, suffix);
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> gguf_name(std::string_view name) {
  return renamed(name, &NamePair::first, &NamePair::second, hugging_face_layers, gguf_layers);
}

std::optional<std::string> hugging_face_name(std::string_view name) {
  return renamed(name, &NamePair::second, &NamePair::first, gguf_layers, hugging_face_layers);
}

std::string name_in_layer(std::int64_t layer, std::string_view name) {
  return fmt::format("{}{}.{}", gguf_layers, layer, name);
}

}  // namespace kvzap::gguf
