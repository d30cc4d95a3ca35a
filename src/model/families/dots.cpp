// dots.llm1 of rednote: experts as in GLM-4.5, norms of queries and keys.
#include "model/families/families.hpp"

namespace kvzap::model {

const Family dots1 = [] {
  Family family;
  family.class_name = "Dots1ForCausalLM";
  family.model_type = "dots1";
  family.tested = family_tests;
  family.default_key_value_heads = 32;
  family.read = [](ConfigFields& fields, ModelConfig& config) {
    config.qk_norm = QkNorm::head;
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
    const double first = fields.find_number("max_window_layers", 0, max_size).value_or(62);
    std::vector<bool> slides;
    for (std::size_t l = 0; l < config.layers.size(); ++l) {
      slides.push_back(static_cast<double>(l) >= first);
    }
    read_windows(fields, sliding_window_or(fields, 4096), slides, config);
    GroupedExperts rules;
    rules.default_per_token = 0;
    rules.default_shared = 0;
    rules.normalises = false;
    read_grouped_experts(fields, rules, config);
    read_leading_dense(fields, 0, config);
  };
  return family;
}();

}  // namespace kvzap::model
