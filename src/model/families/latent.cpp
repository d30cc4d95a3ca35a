// Families with multi-head latent attention (LatentConfig): DeepSeek-V2 to V3.2, GLM-4.7-Flash,
// GLM-5, A.X-K1, Youtu-LLM, MiniCPM3, Mistral 4, LongCat-Flash, Kimi Linear and Ling 3.
#include <fmt/format.h>

#include <cmath>

#include "files/quote.hpp"
#include "model/families/families.hpp"

namespace kvzap::model {
namespace {

using nlohmann::json;

/// What the fields of latent attention mean if they are absent.
struct LatentDefaults {
  std::int64_t rank, query_rank, nope_dim, rope_dim, value_dim;
};

constexpr std::int64_t most_dims = 65536;

/// Makes the sizes of the cache's rows those of the file: one KV head, whose rows have a latent and
/// RoPE's key.
void rename_latent(ConfigContent& content, const LatentDefaults& absent) {
  const auto size = [&](const char* field, std::int64_t otherwise) -> std::int64_t {
    const auto found = content.find(field);
    if (found == content.end() || found->is_null()) return otherwise;
    const bool is_size = found->is_number_integer() && *found >= 0 && *found <= most_dims;
    return is_size ? found->get<std::int64_t>() : 0;
  };
  const std::int64_t rank = size("kv_lora_rank", absent.rank);
  const std::int64_t rope_dim = size("qk_rope_head_dim", absent.rope_dim);
  const bool are_even = rank % 2 == 0 && rope_dim % 2 == 0;
  const bool fit = are_even && rank > 0 && rope_dim > 0 && rank + rope_dim <= most_dims;
  content["num_key_value_heads"] = 1;
  // Where they do not fit, read_latent names the field.
  content["head_dim"] = fit ? rank + rope_dim : most_dims;
}

std::int64_t even_size(ConfigFields& fields, const char* field, std::int64_t absent) {
  const std::int64_t size = fields.find_size(field, most_dims).value_or(absent);
  if (size % 2 != 0) fields.fail(field, "an even number", fmt::format("{}", size));
  return size;
}

/// Returns the factor by which RoPE scaling of long texts multiplies the scores of attention.
double score_factor(ConfigFields& fields, const ModelConfig& config) {
  if (!config.rope_scaling) return 1;
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const json* const object = fields.get(key);
    if (object == nullptr || !object->is_object()) continue;
    ConfigFields nested(*object, fields.file(), key);
    const double all = nested.find_number("mscale_all_dim", 0, 1e3).value_or(0);
    const double factor = config.rope_scaling->factor;
    if (all == 0 || factor <= 1) return 1;
    const double scale = 0.1 * all * std::log(factor) + 1;
    return scale * scale;
  }
  return 1;
}

void read_latent(ConfigFields& fields, const LatentDefaults& absent, ModelConfig& config) {
  LatentConfig latent;
  latent.rank = even_size(fields, "kv_lora_rank", absent.rank);
  latent.rope_dim = even_size(fields, "qk_rope_head_dim", absent.rope_dim);
  if (config.head_dim != latent.rank + latent.rope_dim) {
    fields.fail("kv_lora_rank",
                fmt::format("at most {} with qk_rope_head_dim ({})", most_dims, latent.rope_dim),
                fmt::format("{}", latent.rank));
  }
  latent.nope_dim = fields.find_size("qk_nope_head_dim", most_dims).value_or(absent.nope_dim);
  latent.value_dim = fields.find_size("v_head_dim", most_dims).value_or(absent.value_dim);
  constexpr const char* query_rank = "q_lora_rank";
  latent.query_rank = fields.find_size(query_rank, max_size)
                          .value_or(fields.has_key(query_rank) ? 0 : absent.query_rank);
  config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
  fields.get("qk_head_dim");  // the sum of others
  config.attention_multiplier =
      score_factor(fields, config) / std::sqrt(static_cast<double>(latent.query_dim()));
  config.latent = latent;
}

/// The rules of RoPE for a family whose RoPE rotates qk_rope_head_dim dimensions.
RopeRules latent_rope(std::int64_t rope_dim) {
  RopeRules rules;
  rules.rotary_dim_field = "qk_rope_head_dim";
  rules.default_rotary_dim = rope_dim;
  rules.is_interleaved = true;
  return rules;
}

/// Reads the experts of DeepSeek-V3 and its kin.
void read_deepseek_experts(ConfigFields& fields, const GroupedExperts& rules, ModelConfig& config) {
  for (const char* field : {"num_nextn_predict_layers", "num_mtp_layers", "ep_size", "seq_aux",
                            "aux_loss_alpha", "topk_method"}) {
    fields.get(field);  // for speculation and training
  }
  fields.require("moe_layer_freq", 1);
  read_grouped_experts(fields, rules, config);
}

constexpr LatentDefaults v2_defaults{512, 1536, 128, 64, 128};

void read_v2_experts(ConfigFields& fields, ModelConfig& config) {
  fields.require("mlp_bias", false);
  fields.require("scoring_func", "softmax");
  fields.get("norm_topk_prob");  // the class ignores it
  const std::string method = fields.find_text("topk_method").value_or("greedy");
  if (method != "greedy" && method != "group_limited_greedy") {
    fields.fail("topk_method", "greedy or group_limited_greedy", files::in_quotes(method));
  }
  GroupedExperts rules;
  rules.default_per_token = 0;
  rules.default_shared = 2;
  rules.default_width = 1407;
  read_deepseek_experts(fields, rules, config);
  ExpertsConfig& experts = *config.experts;
  experts.scores = ExpertsConfig::Scores::softmax;
  experts.has_correction = false;
  experts.normalises = false;
  experts.ranks_groups_by_best = true;
  if (method == "greedy") experts.groups = experts.groups_per_token = 1;
  read_leading_dense(fields, 0, config);
}

/// DeepSeek-V3 and its kin: V2's sizes unless the file says otherwise.
Family deepseek_family() {
  Family family;
  family.tested = family_tests;
  family.rope = latent_rope(v2_defaults.rope_dim);
  family.rename = [](ConfigContent& content) { rename_latent(content, v2_defaults); };
  return family;
}

GroupedExperts deepseek_experts() {
  GroupedExperts rules;
  rules.default_width = 2048;
  rules.default_scale = 2.5;
  rules.default_groups = 8;
  rules.default_groups_per_token = 4;
  return rules;
}

/// Reads the part that an indexer has in attention.
void read_indexer(ConfigFields& fields, ModelConfig& config) {
  config.attention_top_k = fields.find_size("index_topk", max_size).value_or(2048);
  for (const char* field : {"index_head_dim", "index_n_heads", "indexer_types", "layer_types",
                            "index_topk_freq", "index_skip_topk_offset"}) {
    fields.get(field);
  }
}

/// The names of LongCat-Flash's fields, and the number of layers: a layer of the file has two
/// parts, each of attention and a dense part.
void rename_longcat(ConfigContent& content) {
  rename_latent(content, v2_defaults);
  rename_field(content, "ffn_hidden_size", "intermediate_size");
  rename_field(content, "expert_ffn_hidden_size", "moe_intermediate_size");
  rename_field(content, "moe_topk", "num_experts_per_tok");
  constexpr const char* parts = "num_hidden_layers";
  if (!content.contains(parts)) content[parts] = 56;
  const auto pairs = content.find("num_layers");
  if (pairs == content.end()) return;
  const bool fits = pairs->is_number_unsigned() && pairs->get<std::uint64_t>() < max_size / 2;
  // Where it does not, ModelConfig's bound of num_hidden_layers refuses it.
  content[parts] = fits ? json(2 * pairs->get<std::int64_t>()) : *pairs;
}

/// The input of the first part's feed-forward part goes to experts, too, which end with the second
/// part. Some of them return their input.
void read_longcat(ConfigFields& fields, ModelConfig& config) {
  read_latent(fields, v2_defaults, config);
  LatentConfig& latent = *config.latent;
  const auto hidden = static_cast<double>(config.hidden_size);
  if (latent.query_rank == 0) fields.fail("q_lora_rank", "a whole number above 0", "none");
  *config.attention_multiplier *= std::sqrt(hidden / static_cast<double>(latent.query_rank));
  latent.row_multiplier = std::sqrt(hidden / static_cast<double>(latent.rank));
  for (const char* field : {"num_layers", "moe_topk", "ffn_hidden_size", "expert_ffn_hidden_size",
                            "attention_method", "mla_scale_q_lora", "mla_scale_kv_lora"}) {
    fields.get(field);
  }
  if (config.num_hidden_layers % 2 != 0) {
    fields.fail("num_hidden_layers", "an even number", fmt::format("{}", config.num_hidden_layers));
  }
  fields.require("zero_expert_type", "identity");
  constexpr const char* zero_field = "zero_expert_num";
  const std::int64_t zeros =
      fields.find_count(zero_field, 0, most_dims).value_or(fields.has_key(zero_field) ? 0 : 256);
  ExpertsConfig experts =
      read_experts(fields, "n_routed_experts", 12, config, "num_experts_per_tok", zeros);
  experts.intermediate_size = fields.find_size("moe_intermediate_size", max_size).value_or(2048);
  experts.has_correction = experts.joins_next = true;
  experts.has_router_bias = fields.flag("router_bias", false);
  experts.scale = read_multiplier(fields, "routed_scaling_factor", 6);
  config.experts = experts;
  for (std::size_t l = 0; l < config.layers.size(); l += 2) config.layers[l].has_experts = true;
}

/// "model.layers.5.self_attn.o_proj" is the file's "model.layers.2.self_attn.1.o_proj".
std::string longcat_name(std::string_view name) {
  constexpr std::string_view layers = "model.layers.";
  if (name.substr(0, layers.size()) != layers) return std::string(name);
  const std::string_view of_layer = name.substr(layers.size());
  const std::size_t dot = of_layer.find('.');
  const std::int64_t part = std::stoll(std::string(of_layer.substr(0, dot)));
  const std::string_view inner = of_layer.substr(dot + 1);
  const std::size_t end = inner.find('.');
  const std::string_view block = inner.substr(0, end);
  const std::string number = block == "mlp" ? "" : fmt::format(".{}", part % 2);
  return fmt::format("{}{}.{}{}{}", layers, part / 2, block, number, inner.substr(end));
}

}  // namespace

const Family deepseek_v2 = [] {
  Family family = deepseek_family();
  family.class_name = "DeepseekV2ForCausalLM";
  family.model_type = "deepseek_v2";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_latent(fields, v2_defaults, config);
    read_v2_experts(fields, config);
  };
  return family;
}();

const Family deepseek_v3 = [] {
  Family family = deepseek_family();
  family.class_name = "DeepseekV3ForCausalLM";
  family.model_type = "deepseek_v3";
  family.text_types = {"kimi_k2"};
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_latent(fields, v2_defaults, config);
    config.rope_is_interleaved = fields.flag("rope_interleave", true);
    fields.require("scoring_func", "sigmoid");
    read_deepseek_experts(fields, deepseek_experts(), config);
    read_leading_dense(fields, 3, config);
  };
  return family;
}();

const Family sarvam_mla = [] {
  static constexpr LatentDefaults absent{512, 0, 128, 64, 128};
  Family family = deepseek_family();
  family.class_name = "SarvamMLAForCausalLM";
  family.other_classes = {"DeepseekV3ForCausalLM"};
  family.model_type = "sarvam_mla";
  family.rename = [](ConfigContent& content) {
    rename_latent(content, absent);
    rename_field(content, "num_experts", "n_routed_experts");
    rename_field(content, "num_shared_experts", "n_shared_experts");
    const auto scaling = content.find("rope_scaling");
    if (scaling == content.end() || !scaling->is_object()) return;
    for (const char* key : {"type", "rope_type"}) {
      const auto type = scaling->find(key);
      if (type != scaling->end() && *type == "deepseek_yarn") *type = "yarn";
    }
  };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_latent(fields, absent, config);
    config.rope_is_interleaved = fields.flag("rope_interleave", true);
    fields.require("scoring_func", "sigmoid");
    GroupedExperts rules = deepseek_experts();
    rules.default_groups = rules.default_groups_per_token = 1;
    read_deepseek_experts(fields, rules, config);
    read_leading_dense(fields, 1, config);
    for (const char* field : {"num_experts", "num_shared_experts"}) fields.get(field);
  };
  return family;
}();

const Family deepseek_v32 = [] {
  Family family = deepseek_family();
  family.class_name = "DeepseekV32ForCausalLM";
  family.model_type = "deepseek_v32";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_latent(fields, v2_defaults, config);
    read_indexer(fields, config);
    fields.require("scoring_func", "sigmoid");
    fields.require("mlp_bias", false);
    read_deepseek_experts(fields, deepseek_experts(), config);
    read_leading_dense(fields, 3, config);
    read_sparse_types(fields, config);
  };
  return family;
}();

const Family glm_moe_dsa = [] {
  static constexpr LatentDefaults absent{512, 2048, 192, 64, 256};
  Family family = deepseek_family();
  family.class_name = "GlmMoeDsaForCausalLM";
  family.model_type = "glm_moe_dsa";
  family.default_norm_eps = 1e-5;
  family.rename = [](ConfigContent& content) { rename_latent(content, absent); };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_latent(fields, absent, config);
    read_indexer(fields, config);
    fields.require("mlp_bias", false);
    GroupedExperts rules = deepseek_experts();
    rules.default_groups = rules.default_groups_per_token = 1;
    read_deepseek_experts(fields, rules, config);
    read_leading_dense(fields, 3, config);
    read_sparse_types(fields, config);
  };
  return family;
}();

const Family axk1 = [] {
  Family family = deepseek_family();
  family.class_name = "AXK1ForCausalLM";
  family.model_type = "axk1";
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_latent(fields, v2_defaults, config);
    config.rope_is_interleaved = fields.flag("rope_interleave", true);
    read_deepseek_experts(fields, deepseek_experts(), config);
    read_leading_dense(fields, 1, config);
    read_sparse_types(fields, config);
  };
  family.tensors.experts_out = "post_mlp_layernorm";
  return family;
}();

const Family glm4_moe_lite = [] {
  static constexpr LatentDefaults absent{512, 768, 192, 64, 256};
  Family family;
  family.class_name = "Glm4MoeLiteForCausalLM";
  family.model_type = "glm4_moe_lite";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.rope = latent_rope(absent.rope_dim);
  family.rename = [](ConfigContent& content) { rename_latent(content, absent); };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_latent(fields, absent, config);
    config.rope_is_interleaved = fields.flag("rope_interleave", true);
    GroupedExperts rules;
    rules.default_per_token = 4;
    rules.default_width = 1536;
    rules.default_scale = 1.8;
    read_deepseek_experts(fields, rules, config);
    // Without mlp_layer_types, all layers but the first one have experts.
    fields.get("first_k_dense_replace");  // the class ignores it
    for (LayerConfig& layer : config.layers) layer.has_experts = &layer != &config.layers[0];
    read_sparse_types(fields, config);
  };
  return family;
}();

const Family youtu = [] {
  Family family;
  family.class_name = "YoutuForCausalLM";
  family.model_type = "youtu";
  family.tested = family_tests;
  family.ties_by_default = true;
  family.rope = latent_rope(v2_defaults.rope_dim);
  family.rename = [](ConfigContent& content) { rename_latent(content, v2_defaults); };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_latent(fields, v2_defaults, config);
    config.rope_is_interleaved = fields.flag("rope_interleave", true);
    fields.get("embedding_initializer_range");  // for training
  };
  return family;
}();

const Family minicpm3 = [] {
  static constexpr LatentDefaults absent{256, 768, 64, 32, 0};
  Family family;
  family.class_name = "MiniCPM3ForCausalLM";
  family.model_type = "minicpm3";
  family.tested = family_tests;
  family.default_norm_eps = 1e-5;
  family.ties_by_default = true;
  family.rope = latent_rope(absent.rope_dim);
  family.rope.is_interleaved = false;
  family.rename = [](ConfigContent& content) { rename_latent(content, absent); };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    LatentDefaults own = absent;
    own.value_dim = config.hidden_size / config.num_attention_heads;
    if (own.value_dim == 0) {
      fields.fail("hidden_size",
                  fmt::format("at least num_attention_heads ({})", config.num_attention_heads),
                  fmt::format("{}", config.hidden_size));
    }
    read_latent(fields, own, config);
    fields.require("mlp_bias", false);
    config.embedding_multiplier = read_multiplier(fields, "scale_emb", 12);
    config.rounds_embedding_multiplier = true;
    const double layers = std::sqrt(static_cast<double>(config.num_hidden_layers));
    const auto depth = fields.find_positive("scale_depth");
    config.residual_multiplier =
        depth ? *depth / layers : (fields.has_key("scale_depth") ? 1 : 1.4 / layers);
    const auto base = fields.find_size("dim_model_base", max_size);
    const auto hidden = static_cast<double>(config.hidden_size);
    config.logits_divisor = base ? hidden / static_cast<double>(*base)
                                 : (fields.has_key("dim_model_base") ? 1 : hidden / 256);
  };
  return family;
}();

const Family longcat_flash = [] {
  Family family = deepseek_family();
  family.class_name = "LongcatFlashForCausalLM";
  family.model_type = "longcat_flash";
  family.default_norm_eps = 1e-5;
  family.rope.default_theta = 1e7;
  family.rename = rename_longcat;
  family.read = read_longcat;
  family.tensors.feed_forward = "mlps";
  family.tensors.router = "mlp.router.classifier";
  family.tensors.correction = "mlp.router.e_score_correction_bias";
  family.stored_name = longcat_name;
  return family;
}();

const Family mistral4 = [] {
  static constexpr LatentDefaults absent{256, 1024, 64, 64, 128};
  Family family;
  family.class_name = "Mistral4ForCausalLM";
  family.model_type = "mistral4";
  family.tested = family_tests;
  family.rope = latent_rope(absent.rope_dim);
  family.rope.scales_queries = true;
  family.rename = [](ConfigContent& content) { rename_latent(content, absent); };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    if (fields.get("rope_parameters") == nullptr && fields.get("rope_scaling") == nullptr) {
      fields.fail("rope_parameters", "an object", "none");
    }
    read_latent(fields, absent, config);
    config.rope_is_interleaved = fields.flag("rope_interleave", true);
    GroupedExperts rules;
    rules.default_per_token = 4;
    rules.default_width = 2048;
    read_deepseek_experts(fields, rules, config);
    config.experts->scores = ExpertsConfig::Scores::softmax;
    config.experts->has_correction = false;
    read_leading_dense(fields, 0, config);
  };
  return family;
}();

// Kimi Linear and Ling 3: Kimi Delta Attention in most layers, latent attention in the others.
namespace {

void set_kimi_net(ConfigFields& fields, std::int64_t heads, std::int64_t dim, std::int64_t kernel,
                  ModelConfig& config) {
  if (heads > max_size / (dim * dim)) {
    fields.fail("linear_head_dim", fmt::format("states of at most {} values in a layer", max_size),
                fmt::format("{} of {} x {}", heads, dim, dim));
  }
  DeltaNetConfig net;
  net.kind = DeltaNetConfig::Kind::kimi;
  net.key_heads = net.value_heads = heads;
  net.key_dim = net.value_dim = dim;
  net.kernel = kernel;
  config.delta_net = net;
}

/// Sets the layers that are not full by layer_types or else by `is_full`.
template <class IsFull>
void set_kimi_layers(ConfigFields& fields, const IsFull& is_full, ModelConfig& config) {
  const auto stated = read_layer_types(fields, "linear_attention", config);
  for (std::size_t l = 0; l < config.layers.size(); ++l) {
    const bool is_linear = stated ? (*stated)[l] : !is_full(static_cast<std::int64_t>(l));
    if (is_linear) config.layers[l].mixing = TokenMixing::delta_net;
  }
}

/// Gives fields of transformers and of published files one name each, and removes the others.
void rename_kimi_experts(ConfigContent& content) {
  constexpr std::pair<const char*, const char*> names[] = {
      {"num_expert_group", "n_group"},
      {"num_local_experts", "num_experts"},
      {"num_experts_per_token", "num_experts_per_tok"},
      {"n_shared_experts", "num_shared_experts"},
      {"moe_renormalize", "norm_topk_prob"},
      {"model_max_length", "max_position_embeddings"}};
  for (const auto& [own, name] : names) {
    rename_field(content, own, name);
    content.erase(own);
  }
}

/// The object of older fields of Kimi Linear's nets.
constexpr const char* older_net = "linear_attn_config";

/// Reads the layers of that object, which are counted from 1.
std::vector<bool> read_kimi_lists(ConfigFields& fields, const ModelConfig& config) {
  const auto count = config.num_hidden_layers;
  std::vector<int> kinds(static_cast<std::size_t>(count), -1);
  bool has_all = true;
  for (const char* field : {"kda_layers", "full_attn_layers"}) {
    const json* const layers = fields.get(field);
    has_all = has_all && layers != nullptr;
    if (layers == nullptr) continue;
    if (!layers->is_array()) fields.fail(field, "an array", files::described(*layers));
    for (const json& layer : *layers) {
      if (!layer.is_number_integer() || layer < 1 || layer > count) {
        fields.fail(field, fmt::format("numbers of layers, 1 to {}", count),
                    files::described(layer));
      }
      kinds[layer.get<std::size_t>() - 1] = std::string_view(field) == "full_attn_layers" ? 1 : 0;
    }
  }
  if (!has_all) return {};
  std::vector<bool> is_full;
  for (std::size_t l = 0; l < kinds.size(); ++l) {
    if (kinds[l] < 0) {
      fields.fail("kda_layers", fmt::format("layer {} here or in full_attn_layers", l + 1), "none");
    }
    is_full.push_back(kinds[l] == 1);
  }
  return is_full;
}

void read_kimi_linear(ConfigFields& fields, ModelConfig& config) {
  const json empty = json::object();
  const json* const stated = fields.get(older_net);
  if (stated != nullptr && !stated->is_object()) {
    fields.fail(older_net, "an object", files::described(*stated));
  }
  ConfigFields own(stated == nullptr ? empty : *stated, fields.file(), older_net);
  const std::int64_t dim = fields.find_size("linear_head_dim", most_dims).value_or(128);
  set_kimi_net(fields, fields.find_size("linear_num_heads", most_dims).value_or(32), dim,
               fields.find_size("linear_conv_kernel_dim", DeltaNetConfig::max_kernel).value_or(4),
               config);
  config.delta_net->gate_rank = dim;
  const std::vector<bool> is_full = read_kimi_lists(own, config);
  set_kimi_layers(
      fields,
      [&](std::int64_t l) {
        return is_full.empty() ? l > 0 && l % 4 == 0 : is_full[static_cast<std::size_t>(l)];
      },
      config);
}

Family kimi_family() {
  Family family;
  family.tested = family_tests;
  family.rope = latent_rope(v2_defaults.rope_dim);
  return family;
}

constexpr LatentDefaults kimi_defaults{512, 0, 128, 64, 128};

}  // namespace

const Family kimi_linear = [] {
  Family family = kimi_family();
  family.class_name = "KimiLinearForCausalLM";
  family.model_type = "kimi_linear";
  family.default_norm_eps = 1e-5;
  family.rename = [](ConfigContent& content) {
    rename_latent(content, kimi_defaults);
    rename_kimi_experts(content);
    rename_inner_field(content, older_net, "num_heads", "linear_num_heads");
    rename_inner_field(content, older_net, "head_dim", "linear_head_dim");
    rename_inner_field(content, older_net, "short_conv_kernel_size", "linear_conv_kernel_dim");
  };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    fields.require_none("rope_scaling");
    read_latent(fields, kimi_defaults, config);
    config.rope_is_interleaved = false;
    for (LayerConfig& layer : config.layers) layer.has_rope = false;
    fields.require("mla_use_nope", true);
    fields.require("moe_router_activation_func", "sigmoid");
    fields.get("use_grouped_topk");  // without it there is one group
    read_kimi_linear(fields, config);
    GroupedExperts rules;
    rules.count_field = "num_experts";
    rules.shared_field = "num_shared_experts";
    rules.default_width = 1024;
    rules.default_scale = 2.446;
    read_deepseek_experts(fields, rules, config);
    read_leading_dense(fields, 1, config);
    read_sparse_types(fields, config);
  };
  TensorNames& names = family.tensors;
  names.delta_maps = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"};
  names.delta_convolutions = {"self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"};
  names.delta_strengths = "self_attn.b_proj";
  names.delta_decay_rates = "self_attn.A_log";
  names.delta_decay_shifts = "self_attn.dt_bias";
  names.delta_norm = "self_attn.o_norm";
  names.delta_output = "self_attn.o_proj";
  names.delta_decay_latents = "self_attn.f_a_proj";
  names.delta_decays = "self_attn.f_b_proj";
  names.delta_gate_latents = "self_attn.g_a_proj";
  names.delta_gates = "self_attn.g_b_proj";
  names.delta_decay_rates_are_column = true;
  names.router = "block_sparse_moe.gate";
  names.correction = "block_sparse_moe.gate.e_score_correction_bias";
  names.expert_gate = "block_sparse_moe.experts.{}.w1";
  names.expert_up = "block_sparse_moe.experts.{}.w3";
  names.expert_down = "block_sparse_moe.experts.{}.w2";
  names.shared = "block_sparse_moe.shared_experts";
  return family;
}();

const Family bailing_hybrid = [] {
  Family family = kimi_family();
  family.class_name = "BailingHybridForCausalLM";
  family.model_type = "bailing_hybrid";
  family.rope.default_theta = 6e6;
  family.rename = [](ConfigContent& content) {
    // head_dim is that of the nets. transformers writes both.
    if (!content.contains("linear_head_dim")) rename_field(content, "head_dim", "linear_head_dim");
    rename_latent(content, kimi_defaults);
    rename_kimi_experts(content);
  };
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    read_latent(fields, kimi_defaults, config);
    config.latent->gates_heads = true;
    const std::int64_t heads =
        fields.find_size("linear_num_heads", most_dims).value_or(config.num_attention_heads);
    const std::int64_t dim = fields.find_size("linear_head_dim", most_dims).value_or(128);
    const auto kernel = fields.find_size("short_conv_kernel_size", DeltaNetConfig::max_kernel);
    set_kimi_net(fields, heads, dim,
                 fields.find_size("linear_conv_kernel_dim", DeltaNetConfig::max_kernel)
                     .value_or(kernel.value_or(4)),
                 config);
    constexpr const char* bound = "kda_lower_bound";
    const double least = fields.find_number(bound, -1e3, -1e-3).value_or(-5);
    if (fields.flag("kda_safe_gate", true)) config.delta_net->least_log_decay = least;
    const std::int64_t group = fields.find_size("layer_group_size", max_size).value_or(6);
    set_kimi_layers(
        fields, [&](std::int64_t l) { return (l + 1) % group == 0; }, config);
    fields.get("mtp_loss_scaling_factor");  // for training
    GroupedExperts rules;
    rules.count_field = "num_experts";
    rules.shared_field = "num_shared_experts";
    rules.default_width = 768;
    rules.default_scale = 2.5;
    rules.default_groups = 8;
    rules.default_groups_per_token = 4;
    read_deepseek_experts(fields, rules, config);
    read_leading_dense(fields, 2, config);
    read_sparse_types(fields, config);
  };
  TensorNames& names = family.tensors;
  names.embedding = "model.word_embeddings";
  names.latent = "attention";
  names.output = names.delta_output = "attention.dense";
  names.delta_maps = {"attention.q_proj", "attention.k_proj", "attention.v_proj"};
  names.delta_convolutions = {"attention.q_conv1d", "attention.k_conv1d", "attention.v_conv1d"};
  names.delta_strengths = "attention.b_proj";
  names.delta_decays = "attention.f_proj";
  names.delta_gates = "attention.g_proj";
  names.delta_decay_rates = "attention.A_log";
  names.delta_decay_shifts = "attention.dt_bias";
  names.delta_norm = "attention.o_norm";
  names.correction = "mlp.gate.expert_bias";
  return family;
}();

}  // namespace kvzap::model
