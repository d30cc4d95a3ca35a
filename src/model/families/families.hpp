// The list of all families.
#pragma once

#include "model/families/family.hpp"

namespace kvzap::model {

extern const Family qwen3, qwen2, llama, mistral;
extern const Family qwen3_next, qwen3_5, qwen3_5_moe;
extern const Family qwen3_moe, qwen2_moe, mixtral, ministral3, minimax_m2, minimax, smollm3, olmo2,
    phi3, granite, glm4, glm4_moe, gemma2, gemma3, olmo3, gpt_oss, cohere2, llama4;
extern const Family arcee, nemotron, apertus, starcoder2, stablelm, olmo, phi, gpt_neox, falcon,
    gpt2;
extern const Family seed_oss, ernie4_5, ernie4_5_moe, exaone4, exaone_moe, glm, gemma, vaultgemma,
    cwm, helium, granitemoe, granitemoeshared, granite_swa, granitemoe_swa, olmoe, flex_olmo,
    hunyuan_v1_dense, hunyuan_v1_moe, dots1, cohere, cohere2_moe, solar_open, afmoe, mellum,
    ministral, hyperclovax, hy_v3, flint;
extern const Family deepseek_v2, deepseek_v3, deepseek_v32, glm4_moe_lite, glm_moe_dsa, sarvam_mla,
    axk1, youtu, minicpm3, mistral4, longcat_flash, kimi_linear, bailing_hybrid;
extern const Family gemma4, gemma4_unified, gemma3n;
extern const Family lfm2, lfm2_moe, bamba, granitemoehybrid, nemotron_h, falcon_h1, olmo_hybrid,
    jamba, lfm3, zamba, zamba2;
extern const Family exaone, internlm3, iquestcoder, emu3, sarvam_moe, mimo_v2_flash, laguna,
    step3p5, codegen, dbrx, phi4_multimodal, phi4mm, modernbert_decoder, xglm, gpt_neox_japanese;
extern const Family jais2, nanochat, bitnet, phimoe, kolibri1, opt, biogpt, persimmon, gpt_bigcode,
    gptj, gpt_neo, aria_text;

/// Tests of families without an older suite of their own.
inline constexpr std::string_view family_tests =
    "logits, answers and evicted pairs equal transformers and kvpress (random weights)";

}  // namespace kvzap::model
