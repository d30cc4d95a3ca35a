#!/usr/bin/env python3
"""Writes tests/golden/families: a small random model of each family, and runs of it.

Run from anywhere, without network access; takes a few minutes of processor time:

    python3 -m venv venv && venv/bin/pip install kvpress transformers==5.24.0
    venv/bin/pip install --no-deps kvpress==0.5.5  # it asks for an older transformers
    venv/bin/python tests/golden/make_family_goldens.py [--families qwen3,olmo2]

    NAME/config.json, model.safetensors   the model, as save_pretrained writes it in bfloat16
    NAME/kvzap-linear/                    a random surrogate of it
    NAME/golden.json, golden.safetensors  the runs; README.md beside this file describes them

Models run in float32. DMSPress over KVzapPress chooses the evicted pairs of pruned runs; attention
gives them a weight of exactly zero. Layers with windows, chunks or linear attention are not pruned.
Results must not depend on rounding. So the script draws another seed until all choices of a family
(likeliest id, experts, evicted pairs) are clear by the margins of margins.py.

With --check the script writes nothing. It runs the models in the folders again, compares the
results with the files, and exits with 1 if ids or pairs differ, or numbers by more than 1e-5 of the
largest of their tensor.
"""

import argparse
import contextlib
import json
import operator
import pathlib
import shutil
import sys
import tempfile
import types
from unittest import mock

import make_policy_goldens
import torch
import transformers
from kvpress import DMSPress, ExpectedAttentionPress, KeyDiffPress, KnormPress, SnapKVPress
from kvpress.presses import expected_attention_press
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel, KVzapPress
from kvpress.utils import compute_n_kept
from hybrid_models import HybridCache, accept_newer_names, attached, attention_layers, drop_tensors, fuse_experts
from hybrid_models import rename_dense_parts, split_convolutions
from step_model import Step3p5ForCausalLM, name_published_tensors
from make_base_goldens import watched_inputs
from make_policy_goldens import exact_attention, save_file
from margins import Margins, TooClose, watch_routers
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers import AttentionMaskInterface, Emu3ForCausalLM, Emu3TextConfig
from transformers import Mistral4Config, Mistral4ForCausalLM, Step3p7TextConfig
from transformers.masking_utils import eager_mask
from transformers.models.falcon import modeling_falcon
from transformers.models.gpt_neo import modeling_gpt_neo
from transformers.models.gpt_neox_japanese import modeling_gpt_neox_japanese
from transformers.models.minimax.modeling_minimax import MiniMaxCache
from transformers.models.xglm import modeling_xglm

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE / "families"
PROMPT_TOKENS = 100
NEW_TOKENS = 24
WINDOW = 8
EVICT_RATIO = 0.5
DIFFERENT_IDS = 10  # at least, of an answer
TOLERANCE = 1e-5

# ---- Families -----------------------------------------------------------------------------------

BASE = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def family(model_type, *without, **fields):
    return {"model_type": model_type, **{k: v for k, v in BASE.items() if k not in without}, **fields}


def rope(theta, **fields):
    return {"rope_type": "default", "rope_theta": theta, **fields}


# Fields of BASE that some configurations lack or call otherwise.
OWN_NAMES = ("head_dim", "hidden_act", "intermediate_size", "num_key_value_heads", "rms_norm_eps")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
WINDOW_KIND, FULL = "sliding_attention", "full_attention"
SLIDING = [WINDOW_KIND, FULL, WINDOW_KIND, FULL]
# What Gemma 3n and 4 have in common.
GEMMA4_LACKS = ("hidden_act", "num_key_value_heads", "rope_parameters", "tie_word_embeddings")
GEMMA4 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "sliding_window": 24,
    "rope_parameters": {
        WINDOW_KIND: rope(10000.0),
        FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
    },
}
LATENT = {"kv_lora_rank": 48, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 20}
YARN_LATENT = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.4,
    "mscale_all_dim": 0.9,
}
FAMILIES = {
    "qwen3": family("qwen3", tie_word_embeddings=True),
    "qwen3_moe": family(
        "qwen3_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
    ),
    "olmo2": family("olmo2", rms_norm_eps=1e-5, rope_parameters=rope(500000.0)),
    "smollm3": family(
        "smollm3",
        tie_word_embeddings=True,
        no_rope_layers=[1, 0, 1],
        rope_parameters=rope(50000.0),
    ),
    "granite": family(
        "granite",
        tie_word_embeddings=True,
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        logits_scaling=3.0,
    ),
    # The original length is below any step's: all steps use the long factors.
    "phi3": family(
        "phi3",
        "head_dim",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=32,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        sliding_window=None,
        partial_rotary_factor=0.75,
        max_position_embeddings=256,
        original_max_position_embeddings=4,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5],
            "long_factor": [1.0, 1.2, 1.7, 3.0, 6.0, 11.0],
        },
    ),
    "glm4": family("glm4", attention_bias=True, partial_rotary_factor=0.5),
    "qwen2_moe": family(
        "qwen2_moe",
        num_attention_heads=4,
        qkv_bias=True,
        decoder_sparse_step=2,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        norm_topk_prob=False,
    ),
    "mixtral": family(
        "mixtral",
        num_attention_heads=4,
        head_dim=20,
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=24,
        rms_norm_eps=1e-5,
        rope_parameters=rope(1000000.0),
    ),
    # Prompt and answer reach the fourth multiple of the original length.
    "ministral3": family(
        "ministral3",
        num_attention_heads=9,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "max_position_embeddings": 256,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "glm4_moe": family(
        "glm4_moe",
        rms_norm_eps=1e-5,
        attention_bias=True,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.8,
    ),
    "minimax_m2": family(
        "minimax_m2",
        num_attention_heads=4,
        num_local_experts=8,
        num_experts_per_tok=3,
        intermediate_size=24,
        rotary_dim=8,
        rope_parameters=rope(50000.0, partial_rotary_factor=0.5),
    ),
    "gemma2": family(
        "gemma2",
        num_hidden_layers=4,
        layer_types=SLIDING,
        sliding_window=24,
        tie_word_embeddings=True,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3_text": family(
        "gemma3_text",
        num_hidden_layers=4,
        layer_types=SLIDING,
        sliding_window=24,
        tie_word_embeddings=True,
        query_pre_attn_scalar=20,
        rope_parameters={
            "sliding_attention": rope(10000.0),
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        },
    ),
    "gpt_oss": family(
        "gpt_oss",
        layer_types=SLIDING[:3],
        sliding_window=24,
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=24,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 512,
        },
    ),
    "olmo3": family(
        "olmo3", num_hidden_layers=4, layer_types=SLIDING, sliding_window=24, rope_parameters=rope(500000.0)
    ),
    "cohere2": family(
        "cohere2",
        "head_dim",
        "rms_norm_eps",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=32,
        num_hidden_layers=4,
        layer_types=SLIDING,
        sliding_window=24,
        tie_word_embeddings=True,
        layer_norm_eps=1e-5,
        logit_scale=0.5,
    ),
    # The answer begins a chunk, and another scale of the queries.
    "llama4_text": family(
        "llama4_text",
        num_hidden_layers=4,
        no_rope_layers=[1, 0, 1, 0],
        attention_chunk_size=28,
        intermediate_size=24,
        intermediate_size_mlp=56,
        interleave_moe_layer_step=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        use_qk_norm=True,
        attn_temperature_tuning=True,
        floor_scale=16,
        attn_scale=0.3,
        rms_norm_eps=1e-5,
    ),
    "mistral_window": family("mistral", sliding_window=24),
    "qwen2_window": family(
        "qwen2",
        "head_dim",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=32,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
    ),
    # Two key heads: of three ranks, one has no head of linear attention.
    "qwen3_next": family(
        "qwen3_next",
        num_hidden_layers=4,
        full_attention_interval=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=24,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=16,
        linear_value_head_dim=10,
        linear_conv_kernel_dim=3,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=24,
        norm_topk_prob=True,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.25),
    ),
    "qwen3_5_text": family(
        "qwen3_5_text",
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "full_attention", "linear_attention"],
        head_dim=32,
        linear_num_key_heads=6,
        linear_num_value_heads=12,
        linear_key_head_dim=14,
        linear_value_head_dim=10,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-5,
        rope_parameters=rope(
            100000.0, partial_rotary_factor=0.25, mrope_interleaved=True, mrope_section=[2, 1, 1]
        ),
    ),
    "qwen3_5_moe_text": family(
        "qwen3_5_moe_text",
        "intermediate_size",
        hidden_size=56,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=40,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=18,
        linear_value_head_dim=22,
        linear_conv_kernel_dim=2,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=14,
        shared_expert_intermediate_size=26,
        rope_parameters=rope(
            1000000.0, partial_rotary_factor=0.25, mrope_interleaved=True, mrope_section=[2, 2, 1]
        ),
    ),
    "arcee": family("arcee", hidden_act="relu2", rms_norm_eps=1e-5, attention_bias=True, mlp_bias=True),
    "nemotron": family(
        "nemotron",
        "rms_norm_eps",
        hidden_act="relu2",
        norm_eps=1e-5,
        head_dim=24,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.5),
    ),
    "apertus": family("apertus", hidden_act="xielu", rms_norm_eps=1e-5, rope_parameters=LLAMA3),
    "starcoder2": family(
        "starcoder2",
        "head_dim",
        "rms_norm_eps",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=40,
        hidden_act="gelu_pytorch_tanh",
        norm_epsilon=1e-5,
        use_bias=True,
        rope_parameters=rope(100000.0),
    ),
    "stablelm": family(
        "stablelm",
        "head_dim",
        "rms_norm_eps",
        hidden_size=96,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=40,
        layer_norm_eps=1e-5,
        use_qkv_bias=True,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.25),
    ),
    "olmo": family(
        "olmo",
        "head_dim",
        "rms_norm_eps",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=40,
        clip_qkv=2.0,
    ),
    "phi": family(
        "phi",
        "head_dim",
        "rms_norm_eps",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=40,
        hidden_act="gelu_new",
        layer_norm_eps=1e-5,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.5),
    ),
    "gpt_neox": family(
        "gpt_neox",
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
        hidden_size=64,
        num_attention_heads=4,
        hidden_act="gelu",
        layer_norm_eps=1e-5,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.25),
    ),
    "falcon": family(
        "falcon",
        *OWN_NAMES,
        hidden_size=96,
        num_attention_heads=6,
        num_kv_heads=3,
        ffn_hidden_size=40,
        activation="gelu",
        new_decoder_architecture=True,
        layer_norm_epsilon=1e-5,
    ),
    "falcon_multi_query": family(
        "falcon",
        *OWN_NAMES,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=56,
        activation="gelu",
        layer_norm_epsilon=1e-5,
    ),
    "gpt2": family(
        "gpt2",
        *OWN_NAMES,
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "max_position_embeddings",
        "rope_parameters",
        n_embd=64,
        n_head=4,
        n_layer=3,
        n_positions=160,
        n_inner=56,
    ),
    "seed_oss": family("seed_oss", head_dim=24, attention_bias=True, attention_out_bias=True),
    "ernie4_5": family(
        "ernie4_5",
        head_dim=20,
        rms_norm_eps=1e-5,
        use_bias=True,
        tie_word_embeddings=True,
        rope_parameters=rope(500000.0),
    ),
    "exaone4": family(
        "exaone4",
        rms_norm_eps=1e-5,
        num_hidden_layers=4,
        layer_types=SLIDING,
        sliding_window=24,
        sliding_window_pattern="LG",
        rope_parameters=rope(1000000.0),
    ),
    "glm": family("glm", eos_token_id=255, head_dim=24, attention_bias=True, partial_rotary_factor=0.5),
    "gemma": family("gemma", head_dim=24, hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True),
    "cwm": family(
        "cwm",
        bos_token_id=255,
        eos_token_id=255,
        num_hidden_layers=4,
        layer_types=SLIDING,
        sliding_window=24,
        rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 256,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "helium": family(
        "helium", hidden_size=96, head_dim=12, rms_norm_eps=1e-8, intermediate_size=32, rope_parameters=rope(100000.0)
    ),
    "granitemoe": family(
        "granitemoe",
        "head_dim",
        hidden_size=96,
        num_local_experts=8,
        num_experts_per_tok=3,
        intermediate_size=14,
        tie_word_embeddings=True,
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        logits_scaling=3.0,
    ),
    "granitemoeshared": family(
        "granitemoeshared",
        "head_dim",
        hidden_size=96,
        num_local_experts=6,
        num_experts_per_tok=2,
        intermediate_size=18,
        shared_intermediate_size=22,
        tie_word_embeddings=True,
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        logits_scaling=3.0,
    ),
    "olmoe": family(
        "olmoe",
        "head_dim",
        hidden_size=96,
        rms_norm_eps=1e-5,
        intermediate_size=18,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=False,
        clip_qkv=1.2,
    ),
    "flex_olmo": family(
        "flex_olmo",
        "head_dim",
        hidden_size=96,
        intermediate_size=18,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        rope_parameters=rope(500000.0),
    ),
    "hunyuan_v1_dense": family(
        "hunyuan_v1_dense",
        head_dim=24,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    ),
    "dots1": family(
        "dots1",
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.8,
        num_hidden_layers=4,
        layer_types=SLIDING[::-1],
        sliding_window=24,
        max_window_layers=4,
    ),
    "cohere": family(
        "cohere",
        "head_dim",
        "rms_norm_eps",
        hidden_size=96,
        intermediate_size=32,
        tie_word_embeddings=True,
        layer_norm_eps=1e-5,
        logit_scale=0.5,
        attention_bias=True,
        rope_parameters=rope(500000.0),
    ),
    "vaultgemma": family(
        "vaultgemma",
        "hidden_act",
        hidden_activation="gelu_pytorch_tanh",
        num_hidden_layers=4,
        layer_types=SLIDING,
        sliding_window=24,
        tie_word_embeddings=True,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
    ),
    "ernie4_5_moe": family(
        "ernie4_5_moe",
        rms_norm_eps=1e-5,
        moe_intermediate_size=24,
        moe_k=3,
        moe_num_experts=8,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        tie_word_embeddings=True,
        rope_parameters=rope(500000.0),
    ),
    "exaone_moe": family(
        "exaone_moe",
        rms_norm_eps=1e-5,
        num_hidden_layers=4,
        layer_types=SLIDING,
        sliding_window=24,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=1,
        routed_scaling_factor=1.8,
        first_k_dense_replace=1,
        rope_parameters=rope(1000000.0),
    ),
    "solar_open": family(
        "solar_open",
        "intermediate_size",
        head_dim=24,
        rms_norm_eps=1e-5,
        attention_bias=True,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        routed_scaling_factor=1.4,
        rope_parameters=rope(1000000.0),
    ),
    "afmoe": family(
        "afmoe",
        rms_norm_eps=1e-5,
        num_hidden_layers=4,
        layer_types=SLIDING,
        sliding_window=24,
        moe_intermediate_size=18,
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=2,
        route_scale=1.6,
        mup_enabled=True,
    ),
    "hunyuan_v1_moe": family(
        "hunyuan_v1_moe",
        rms_norm_eps=1e-5,
        intermediate_size=24,
        num_experts=8,
        moe_topk=3,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    ),
    "granite_swa": family(
        "granite_swa",
        "head_dim",
        hidden_size=96,
        intermediate_size=32,
        num_hidden_layers=4,
        layer_types=SLIDING,
        sliding_window=24,
        layer_rope_theta=[10000.0, 0, 10000.0, 50000.0],
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        logits_scaling=3.0,
    ),
    "granitemoe_swa": family(
        "granitemoe_swa",
        "head_dim",
        hidden_size=96,
        num_local_experts=6,
        num_experts_per_tok=2,
        intermediate_size=18,
        shared_intermediate_size=22,
        num_hidden_layers=4,
        layer_types=SLIDING[::-1],
        sliding_window=24,
        tie_word_embeddings=True,
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        logits_scaling=3.0,
    ),
    "cohere2_moe": family(
        "cohere2_moe",
        "rms_norm_eps",
        num_hidden_layers=4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        sliding_window=24,
        intermediate_size=24,
        prefix_dense_intermediate_size=40,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=1,
        shared_expert_combination_strategy="average",
        expert_selection_fn="sigmoid",
        norm_topk_prob=True,
        tie_word_embeddings=True,
        layer_norm_eps=1e-5,
        logit_scale=0.5,
    ),
    "mellum": family(
        "mellum",
        num_hidden_layers=4,
        layer_types=SLIDING,
        mlp_layer_types=["sparse", "dense", "sparse", "sparse"],
        sliding_window=24,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        rope_parameters={"sliding_attention": rope(10000.0), "full_attention": rope(500000.0)},
    ),
    "ministral": family("ministral", num_hidden_layers=4, layer_types=SLIDING, sliding_window=24),
    "hyperclovax": family(
        "hyperclovax",
        head_dim=24,
        attention_bias=True,
        mlp_bias=True,
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        logits_scaling=0.3,
    ),
    "hy_v3": family(
        "hy_v3",
        rms_norm_eps=1e-5,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=1,
        moe_intermediate_size=24,
        router_scaling_factor=1.6,
        mlp_layer_types=["dense", "sparse", "sparse"],
        rope_parameters=rope(1000000.0),
    ),
    "flint": family(
        "flint",
        num_hidden_layers=4,
        layer_types=SLIDING[::-1],
        sliding_window=24,
        mlp_only_layers=[1],
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
        rope_parameters=rope(1000000.0),
    ),
    # A latent for all heads; values of other dimensions than keys; groups of experts.
    "deepseek_v2": family(
        "deepseek_v2",
        "head_dim",
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        **LATENT,
        q_lora_rank=None,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_shared_experts=2,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.7,
    ),
    "deepseek_v3": family(
        "deepseek_v3",
        "head_dim",
        num_key_value_heads=8,
        **LATENT,
        q_lora_rank=20,
        attention_bias=True,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        rope_parameters=YARN_LATENT,
    ),
    "sarvam_mla": family(
        "sarvam_mla",
        "head_dim",
        num_key_value_heads=8,
        **LATENT,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_shared_experts=1,
        rope_parameters=YARN_LATENT,
    ),
    # Texts as short as these see all tokens, whatever the indexer chooses.
    "deepseek_v32": family(
        "deepseek_v32",
        "head_dim",
        num_key_value_heads=8,
        **LATENT,
        q_lora_rank=20,
        mlp_layer_types=["dense", "sparse", "sparse"],
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        index_topk=256,
        index_head_dim=16,
        index_n_heads=2,
    ),
    "glm_moe_dsa": family(
        "glm_moe_dsa",
        "head_dim",
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        **LATENT,
        q_lora_rank=24,
        mlp_layer_types=["dense", "sparse", "sparse"],
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        index_topk=256,
        index_head_dim=16,
        index_n_heads=2,
    ),
    "axk1": family(
        "axk1",
        "head_dim",
        num_key_value_heads=8,
        **LATENT,
        q_lora_rank=20,
        mlp_layer_types=["dense", "sparse", "sparse"],
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        rope_parameters=YARN_LATENT,
    ),
    "glm4_moe_lite": family(
        "glm4_moe_lite",
        "head_dim",
        num_attention_heads=5,
        num_key_value_heads=5,
        rms_norm_eps=1e-5,
        **LATENT,
        q_lora_rank=24,
        mlp_layer_types=["dense", "sparse", "dense"],
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
    ),
    "youtu": family(
        "youtu",
        "head_dim",
        num_attention_heads=3,
        num_key_value_heads=3,
        **LATENT,
        q_lora_rank=20,
        rope_interleave=False,
        tie_word_embeddings=True,
    ),
    # Each of its two layers has two parts with attention. Some experts return their input.
    "longcat_flash": family(
        "longcat_flash",
        "intermediate_size",
        "num_hidden_layers",
        num_key_value_heads=8,
        num_layers=2,
        head_dim=8,
        **LATENT,
        q_lora_rank=20,
        ffn_hidden_size=56,
        expert_ffn_hidden_size=24,
        n_routed_experts=5,
        zero_expert_num=3,
        moe_topk=3,
        routed_scaling_factor=1.5,
    ),
    "minicpm3": family(
        "minicpm3",
        "head_dim",
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        **LATENT,
        q_lora_rank=24,
        scale_emb=3,
        scale_depth=1.4,
        dim_model_base=24,
        rope_parameters=rope(
            10000.0,
            rope_type="longrope",
            factor=4.0,
            original_max_position_embeddings=1024,
            short_factor=[1.0, 1.1, 1.2, 1.4],
            long_factor=[1.0, 1.5, 2.5, 4.0],
        ),
    ),
    "mistral4": family(
        "mistral4",
        "head_dim",
        num_key_value_heads=8,
        **LATENT,
        q_lora_rank=24,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        rope_parameters={
            **YARN_LATENT,
            "original_max_position_embeddings": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
            "partial_rotary_factor": 0.4,
        },
    ),
    # Like E2B: inputs of each layer, layers that read the rows of others, wide feed-forward parts.
    "gemma4": family(
        "gemma4_text",
        *GEMMA4_LACKS,
        **GEMMA4,
        num_hidden_layers=8,
        layer_types=[FULL, WINDOW_KIND, FULL, WINDOW_KIND, WINDOW_KIND, WINDOW_KIND, FULL, FULL],
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
        global_head_dim=24,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=256,
        final_logit_softcapping=5.0,
    ),
    # Like 12B and 31B: full layers have fewer KV heads, whose values are keys.
    "gemma4_unified": family(
        "gemma4_unified_text",
        *GEMMA4_LACKS,
        **{**GEMMA4, "num_key_value_heads": 8},
        num_hidden_layers=5,
        layer_types=[WINDOW_KIND, FULL, WINDOW_KIND, FULL, FULL],
        attention_k_eq_v=True,
        num_global_key_value_heads=4,
        global_head_dim=32,
        use_bidirectional_attention="vision",
    ),
    # Like 26B-A4B: experts beside a dense part.
    "gemma4_moe": family(
        "gemma4_text",
        *GEMMA4_LACKS,
        **{**GEMMA4, "num_key_value_heads": 8},
        num_hidden_layers=4,
        layer_types=SLIDING,
        attention_k_eq_v=True,
        num_global_key_value_heads=4,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=8,
        top_k_experts=3,
        moe_intermediate_size=24,
        final_logit_softcapping=5.0,
    ),
    "gemma3n": family(
        "gemma3n_text",
        *GEMMA4_LACKS,
        "intermediate_size",
        **{k: v for k, v in GEMMA4.items() if k != "rope_parameters"},
        rope_parameters={WINDOW_KIND: rope(10000.0), FULL: rope(1000000.0)},
        num_hidden_layers=7,
        layer_types=[FULL, WINDOW_KIND, FULL, WINDOW_KIND, WINDOW_KIND, FULL, WINDOW_KIND],
        num_kv_shared_layers=3,
        intermediate_size=[56, 56, 56, 56, 72, 72, 72],
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=200,
        activation_sparsity_pattern=[0.8, 0.8, 0.5, 0.0, 0.0, 0.0, 0.0],
        altup_num_inputs=3,
        laurel_rank=8,
        final_logit_softcapping=5.0,
    ),
    "lfm2": family(
        "lfm2",
        "head_dim",
        "rms_norm_eps",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=40,
        block_multiple_of=16,
        block_ffn_dim_multiplier=1.2,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        conv_L_cache=3,
        conv_bias=True,
        norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters=rope(1000000.0),
    ),
    "lfm2_moe": family(
        "lfm2_moe",
        "head_dim",
        "rms_norm_eps",
        hidden_size=80,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
        conv_L_cache=4,
        norm_eps=1e-5,
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        routed_scaling_factor=1.6,
        rope_parameters=rope(1000000.0),
    ),
    # Two of three groups are split between two ranks.
    "bamba": family(
        "bamba",
        "head_dim",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=32,
        num_hidden_layers=4,
        attn_layer_indices=[1, 3],
        mamba_n_heads=12,
        mamba_d_head=16,
        mamba_n_groups=3,
        mamba_d_state=10,
        mamba_d_conv=4,
        mamba_chunk_size=16,
        rms_norm_eps=1e-5,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.5),
    ),
    "granitemoehybrid": family(
        "granitemoehybrid",
        "head_dim",
        hidden_size=80,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=24,
        shared_intermediate_size=32,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        num_local_experts=8,
        num_experts_per_tok=3,
        mamba_n_heads=5,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=18,
        mamba_d_conv=3,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        mamba_chunk_size=32,
        embedding_multiplier=6.0,
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        logits_scaling=0.3,
        tie_word_embeddings=True,
    ),
    "granitemoehybrid_dense": family(
        "granitemoehybrid",
        "head_dim",
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        shared_intermediate_size=48,
        num_hidden_layers=3,
        layer_types=["full_attention", "linear_attention", "full_attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_d_conv=2,
        mamba_chunk_size=32,
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.8,
        logits_scaling=0.5,
    ),
    "nemotron_h": family(
        "nemotron_h",
        "hidden_act",
        "num_hidden_layers",
        "rms_norm_eps",
        "rope_parameters",
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=20,
        intermediate_size=40,
        layer_norm_epsilon=1e-5,
        layers_block_type=["moe", "linear_attention", "full_attention", "mlp", "linear_attention", "full_attention", "moe"],
        mamba_num_heads=6,
        mamba_head_dim=12,
        n_groups=2,
        ssm_state_size=14,
        conv_kernel=4,
        chunk_size=16,
        use_bias=True,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=36,
        routed_scaling_factor=1.6,
    ),
    # Nothing can be pruned.
    "nemotron_h_states": family(
        "nemotron_h",
        "hidden_act",
        "num_hidden_layers",
        "rms_norm_eps",
        "rope_parameters",
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_norm_epsilon=1e-5,
        layers_block_type=["linear_attention", "mlp", "linear_attention"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=4,
        ssm_state_size=8,
        conv_kernel=2,
        use_conv_bias=False,
        chunk_size=32,
    ),
    "falcon_h1": family(
        "falcon_h1",
        "head_dim",
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        mamba_d_ssm=72,
        mamba_n_heads=6,
        mamba_d_head=12,
        mamba_n_groups=2,
        mamba_d_state=14,
        mamba_d_conv=4,
        mamba_chunk_size=16,
        mamba_rms_norm=True,
        rms_norm_eps=1e-5,
        embedding_multiplier=4.0,
        lm_head_multiplier=0.4,
        key_multiplier=0.6,
        attention_out_multiplier=0.8,
        ssm_in_multiplier=1.3,
        ssm_out_multiplier=0.7,
        ssm_multipliers=[0.6, 1.4, 0.9, 1.2, 0.8],
        mlp_multipliers=[1.5, 0.7],
        rope_parameters=rope(100000.0),
    ),
    "falcon_h1_gates": family(
        "falcon_h1",
        "head_dim",
        hidden_size=60,
        num_attention_heads=6,
        num_key_value_heads=3,
        num_hidden_layers=2,
        intermediate_size=40,
        mamba_d_ssm=80,
        mamba_n_heads=5,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=10,
        mamba_d_conv=3,
        mamba_chunk_size=32,
        mamba_proj_bias=True,
        projectors_bias=True,
        attention_bias=True,
        attention_out_multiplier=1.3,
        ssm_out_multiplier=0.6,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "olmo_hybrid": family(
        "olmo_hybrid",
        "head_dim",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=32,
        num_hidden_layers=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        linear_num_key_heads=3,
        linear_num_value_heads=6,
        linear_key_head_dim=12,
        linear_value_head_dim=10,
        linear_conv_kernel_dim=3,
        rope_parameters=rope(500000.0),
    ),
    # Kimi Delta Attention, whose latents give decays and gates, and latent attention without RoPE.
    "kimi_linear": family(
        "kimi_linear",
        "head_dim",
        "rope_parameters",
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        rms_norm_eps=1e-5,
        **LATENT,
        q_lora_rank=None,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=1,
        num_expert_group=1,
        topk_group=1,
        moe_intermediate_size=24,
        routed_scaling_factor=1.7,
        linear_attn_config={
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
            "num_heads": 3,
            "head_dim": 12,
            "short_conv_kernel_size": 3,
        },
    ),
    # Kimi Delta Attention with bounded decays, gates of the heads of latent attention.
    "bailing_hybrid": family(
        "bailing_hybrid",
        "rope_parameters",
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=3,
        **LATENT,
        q_lora_rank=None,
        head_dim=12,
        short_conv_kernel_size=3,
        layer_group_size=2,
        first_k_dense_replace=1,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=1,
        num_expert_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        routed_scaling_factor=1.7,
        rope_theta=10000.0,
        kda_lower_bound=-0.5,
    ),
    # Lightning attention, whose decays differ by head and layer; residual connections from normed inputs.
    "minimax": family(
        "minimax",
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=12,
        layer_types=["linear_attention", FULL, "linear_attention", FULL],
        num_local_experts=8,
        num_experts_per_tok=2,
        intermediate_size=24,
        rms_norm_eps=1e-5,
        block_size=16,
        full_attn_alpha_factor=1.3,
        full_attn_beta_factor=0.8,
        linear_attn_alpha_factor=1.6,
        linear_attn_beta_factor=0.7,
        mlp_alpha_factor=1.4,
        mlp_beta_factor=0.9,
        rope_parameters=rope(1000000.0),
    ),
    "lfm3": family(
        "lfm3",
        "rms_norm_eps",
        hidden_size=80,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=40,
        num_hidden_layers=5,
        layer_types=["conv", "full_attention", "sliding_attention", "conv", "full_attention"],
        conv_L_cache=5,
        conv_bias=True,
        sliding_window=24,
        norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={
            WINDOW_KIND: rope(10000.0),
            FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "lfm3_plain": family(
        "lfm3",
        "rms_norm_eps",
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=3,
        layer_types=["full_attention", "conv", "full_attention"],
        conv_L_cache=3,
        use_sandwich_norm=False,
        use_attention_gate=False,
        attention_bias=True,
        norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={WINDOW_KIND: rope(10000.0), FULL: rope(500000.0)},
    ),
    # Two blocks, the second one of two layers; maps of low rank beside all of the first product.
    "zamba2": family(
        "zamba2",
        "head_dim",
        "hidden_act",
        hidden_size=48,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=40,
        num_hidden_layers=7,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", *["hybrid"] * 2, "linear_attention", "hybrid"],
        num_mem_blocks=2,
        use_shared_attention_adapter=True,
        adapter_rank=6,
        use_mem_rope=True,
        add_bias_linear=True,
        mamba_d_state=10,
        mamba_d_conv=4,
        mamba_ngroups=2,
        n_mamba_heads=6,
        chunk_size=16,
        tie_word_embeddings=True,
    ),
    "zamba2_one_block": family(
        "zamba2",
        "head_dim",
        "rope_parameters",
        hidden_size=60,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=40,
        hidden_act="gelu",
        num_hidden_layers=4,
        layers_block_type=["hybrid", "linear_attention", "hybrid", "linear_attention"],
        adapter_rank=5,
        mamba_d_state=12,
        mamba_d_conv=3,
        n_mamba_heads=5,
        chunk_size=32,
        tie_word_embeddings=True,
    ),
    # Two groups of 60 channels, each in heads of 30.
    "zamba": family(
        "zamba",
        "head_dim",
        "rope_parameters",
        hidden_size=60,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=40,
        hidden_act="gelu",
        num_hidden_layers=6,
        attn_layer_period=2,
        attn_layer_offset=1,
        n_mamba_heads=2,
        mamba_d_state=10,
        mamba_dt_rank=5,
        mamba_proj_bias=True,
        tie_word_embeddings=True,
    ),
    # 120 channels in heads of 30.
    "jamba": family(
        "jamba",
        "head_dim",
        "rope_parameters",
        hidden_size=60,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=24,
        num_hidden_layers=5,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=6,
        num_experts_per_tok=2,
        mamba_d_state=10,
        mamba_d_conv=4,
        mamba_dt_rank=5,
    ),
    "jamba_dense": family(
        "jamba",
        "head_dim",
        "rope_parameters",
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=40,
        num_hidden_layers=3,
        attn_layer_period=2,
        attn_layer_offset=0,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_d_state=16,
        mamba_d_conv=3,
        mamba_expand=3,
        mamba_conv_bias=False,
        mamba_proj_bias=True,
        tie_word_embeddings=True,
    ),
    "jais2": family(
        "jais2",
        "head_dim",
        "rms_norm_eps",
        hidden_size=96,
        intermediate_size=40,
        hidden_act="relu2",
        layer_norm_eps=1e-5,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters=rope(500000.0),
    ),
    "nanochat": family(
        "nanochat",
        "head_dim",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=40,
        hidden_act="relu2",
        final_logit_softcapping=5.0,
    ),
    "bitnet": family(
        "bitnet",
        "head_dim",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=40,
        hidden_act="relu2",
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters=rope(500000.0),
    ),
    "phimoe": family(
        "phimoe",
        "head_dim",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=18,
        num_local_experts=8,
        num_experts_per_tok=2,
        router_jitter_noise=0.2,
        rms_norm_eps=1e-5,
        attention_bias=True,
        lm_head_bias=True,
        original_max_position_embeddings=2048,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.6, 1.8],
            "long_factor": [1.0, 1.2, 1.7, 3.0, 6.0, 11.0, 12.0, 16.0],
            "short_mscale": 1.243,
            "long_mscale": 1.243,
            "original_max_position_embeddings": 2048,
        },
    ),
    "kolibri1": family(
        "kolibri1",
        "intermediate_size",
        num_hidden_layers=4,
        layer_types=SLIDING,
        sliding_window=24,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
        norm_topk_prob=False,
    ),
    "opt": family(
        "opt",
        *OWN_NAMES,
        "rope_parameters",
        hidden_size=96,
        num_attention_heads=6,
        ffn_dim=40,
        activation_function="relu",
        word_embed_proj_dim=96,
        tie_word_embeddings=True,
        max_position_embeddings=160,
    ),
    "biogpt": family(
        "biogpt",
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
        "rope_parameters",
        hidden_size=96,
        num_attention_heads=6,
        intermediate_size=40,
        hidden_act="gelu",
        tie_word_embeddings=True,
        max_position_embeddings=160,
    ),
    "persimmon": family(
        "persimmon",
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
        hidden_size=96,
        num_attention_heads=6,
        intermediate_size=40,
        hidden_act="relu2",
        layer_norm_eps=1e-5,
        rope_parameters=rope(25000.0, partial_rotary_factor=0.5),
    ),
    "gpt_bigcode": family(
        "gpt_bigcode",
        *OWN_NAMES,
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "max_position_embeddings",
        "rope_parameters",
        n_embd=64,
        n_head=4,
        n_layer=3,
        n_positions=160,
        n_inner=56,
        tie_word_embeddings=True,
    ),
    "gptj": family(
        "gptj",
        *OWN_NAMES,
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "max_position_embeddings",
        "rope_parameters",
        n_embd=96,
        n_head=6,
        n_layer=3,
        n_positions=160,
        n_inner=40,
        rotary_dim=8,
    ),
    "gpt_neo": family(
        "gpt_neo",
        *OWN_NAMES,
        "num_attention_heads",
        "num_hidden_layers",
        "rope_parameters",
        hidden_size=96,
        num_heads=6,
        num_layers=4,
        attention_types=[[["local", "global"], 2]],
        window_size=24,
        max_position_embeddings=160,
        intermediate_size=40,
        tie_word_embeddings=True,
    ),
    "aria_text": family(
        "aria_text",
        "head_dim",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=18,
        moe_num_experts=8,
        moe_topk=3,
        moe_num_shared_experts=2,
    ),
    "exaone": family(
        "exaone",
        *OWN_NAMES,
        "num_hidden_layers",
        hidden_size=96,
        num_layers=3,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=40,
        activation_function="silu",
        layer_norm_epsilon=1e-5,
        rope_parameters=LLAMA3,
    ),
    "internlm3": family(
        "internlm3",
        qkv_bias=True,
        bias=True,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 50000.0, "factor": 6.0},
    ),
    "iquestcoder": family("iquestcoder", head_dim=20, rms_norm_eps=1e-5, rope_parameters=rope(500000.0)),
    "sarvam_moe": family(
        "sarvam_moe",
        head_dim=24,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        num_shared_experts=2,
        n_group=2,
        topk_group=1,
        use_qkv_bias=True,
        rope_parameters=rope(8000000.0),
    ),
    # Values are smaller than keys.
    "mimo_v2_flash": family(
        "mimo_v2_flash",
        "rope_parameters",
        num_hidden_layers=4,
        layer_types=[FULL, WINDOW_KIND, WINDOW_KIND, FULL],
        mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        sliding_window=24,
        num_key_value_heads=4,
        head_dim=24,
        v_head_dim=14,
        attention_bias=True,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        rms_norm_eps=1e-5,
        attention_value_scale=0.6,
    ),
    # Three and four ranks share its KV heads.
    "mimo_v2_full": family(
        "mimo_v2_flash",
        layer_types=[FULL] * 3,
        mlp_layer_types=["dense", "sparse", "sparse"],
        num_attention_heads=12,
        num_key_value_heads=2,
        v_head_dim=10,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=20,
        attention_value_scale=None,
        rope_parameters={FULL: rope(50000.0, partial_rotary_factor=0.5)},
    ),
    # Layers with windows have more query heads.
    "laguna": family(
        "laguna",
        num_key_value_heads=2,
        num_hidden_layers=4,
        layer_types=SLIDING,
        sliding_window=24,
        num_attention_heads=4,
        num_attention_heads_per_layer=[12, 4, 8, 4],
        attention_bias=True,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=12,
        moe_routed_scaling_factor=1.6,
        rope_parameters={
            FULL: {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "partial_rotary_factor": 0.5,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
            WINDOW_KIND: rope(10000.0, partial_rotary_factor=0.75),
        },
    ),
    "laguna_elements": family(
        "laguna",
        gating="per-element",
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=16,
        rope_parameters={FULL: rope(500000.0)},
    ),
    # Limits bind in a dense part, in experts alone, in the shared expert alone, and in both.
    "step3p7": family(
        "step3p5",
        "pad_token_id",
        pad_token_id=0,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=44,
        layer_types=[FULL, *SLIDING],
        sliding_window=24,
        num_sliding_attention_heads=6,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        share_expert_dim=12,
        moe_router_scaling_factor=1.6,
        mlp_layer_types=["dense", "dense", "sparse", "sparse", "sparse"],
        swiglu_limits=[0.0, 0.0, 0.7, None, 1.1],
        swiglu_limits_shared=[None, 0.8, 0.0, 0.9, 0.6],
        rms_norm_eps=1e-5,
        rope_parameters={
            FULL: {
                "rope_type": "llama3",
                "rope_theta": 5000000.0,
                "partial_rotary_factor": 0.5,
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "low_freq_factor": 1.0,
                "high_freq_factor": 32.0,
            },
            WINDOW_KIND: rope(10000.0, partial_rotary_factor=1.0),
        },
    ),
    "modernbert_decoder": family(
        "modernbert-decoder",
        *OWN_NAMES,
        "rope_parameters",
        hidden_size=96,
        num_attention_heads=6,
        intermediate_size=40,
        num_hidden_layers=4,
        layer_types=[FULL, WINDOW_KIND, WINDOW_KIND, FULL],
        local_attention=48,
        hidden_activation="gelu",
        norm_bias=True,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "xglm": family(
        "xglm",
        *OWN_NAMES,
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "rope_parameters",
        d_model=96,
        attention_heads=6,
        num_layers=3,
        ffn_dim=40,
        max_position_embeddings=160,
    ),
    "gpt_neox_japanese": family(
        "gpt_neox_japanese",
        *OWN_NAMES,
        hidden_size=48,
        num_attention_heads=4,
        intermediate_multiple_size=2,
        hidden_act="gelu",
        tie_word_embeddings=True,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.5),
    ),
    "codegen": family(
        "codegen",
        *OWN_NAMES,
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "max_position_embeddings",
        "rope_parameters",
        n_embd=96,
        n_head=6,
        n_layer=3,
        n_positions=160,
        n_inner=40,
        rotary_dim=8,
    ),
    "dbrx": family(
        "dbrx",
        *OWN_NAMES,
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "max_position_embeddings",
        d_model=96,
        n_heads=6,
        n_layers=3,
        max_seq_len=4096,
        attn_config={"kv_n_heads": 3, "clip_qkv": 1.5, "rope_theta": 50000.0},
        ffn_config={"ffn_hidden_size": 18, "moe_num_experts": 8, "moe_top_k": 3},
        rope_parameters=rope(50000.0),
    ),
    "emu3_text_model": family(
        "emu3_text_model",
        head_dim=12,
        bos_token_id=1,
        pad_token_id=0,
        rms_norm_eps=1e-5,
        rope_parameters=rope(1000000.0),
    ),
    "cohere_norms": family(
        "cohere",
        "head_dim",
        "rms_norm_eps",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=32,
        tie_word_embeddings=True,
        layer_norm_eps=1e-5,
        logit_scale=0.5,
        use_qk_norm=True,
    ),
    "stablelm_norms": family(
        "stablelm",
        "head_dim",
        "rms_norm_eps",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=40,
        layer_norm_eps=1e-5,
        qk_layernorm=True,
        use_parallel_residual=True,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.25),
    ),
    "phi_norms": family(
        "phi",
        "head_dim",
        "rms_norm_eps",
        hidden_size=96,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=40,
        hidden_act="gelu_new",
        layer_norm_eps=1e-5,
        qk_layernorm=True,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.5),
    ),
}

# Layers of these kinds have no attention.
WITHOUT_ATTENTION = ("linear_attention", "conv", "mlp", "moe")
# Norms of these multiply by 1 plus their weight.
ADDS_ONE = ("gemma2", "gemma3_text", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "gemma", "vaultgemma", "nemotron",
            "step3p5")
# Their layers without windows have no RoPE.
FULL_WITHOUT_ROPE = ("cohere2", "cohere2_moe", "exaone4", "exaone_moe", "afmoe", "flint", "kolibri1")
# Their layers have no RoPE, and no field for it.
WITHOUT_ROPE = ("opt", "biogpt", "gpt_neo", "jamba", "xglm")
# Their RoPE turns neighbouring dimensions.
INTERLEAVED = ("ernie4_5", "ernie4_5_moe", "helium", "cohere", "gptj")
# Their config.json has no layer_types, as those of checkpoints from before that field.
WITHOUT_LAYER_TYPES = ("qwen2_window", "qwen3_next")
# Tensors in float32, by parts of their names. transformers would save them in bfloat16.
IN_FLOAT = dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), ("A_log", "linear_attn.norm"))
# Tensors that transformers' lightning attention derives from the config. Published files need not have them.
LIGHTNING = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
# Checkpoints of these have all experts of a layer in two tensors.
FUSED_EXPERTS = ("qwen3_5_moe_text",)


# ---- Models -------------------------------------------------------------------------------------


def spread(name, shape, config):
    """Standard deviation and mean of a tensor's values."""
    if name.endswith("e_score_correction_bias"):
        return 0.15, 0.0
    if name.endswith("act_fn.beta"):
        return 0.1, 0.5
    if name.endswith(("layer_scalar", "correct_output_scale", "router.scale", "per_expert_scale")):
        return 0.2, 0.9
    if name.endswith("modality_router.weight"):
        return config.hidden_size**0.5, 0.0  # its input is small
    if name.endswith("embed_tokens_per_layer.weight"):
        return config.hidden_size_per_layer_input**-0.5, 0.0
    if name.endswith("act_fn.eps"):
        return 0.0, -1e-6
    own_name = name.replace("norm_attn_norm.", "")  # a block of DBRX
    if ("norm" in own_name or "ln_" in own_name) and not name.endswith("bias"):
        return 0.2, 0.0 if config.model_type in ADDS_ONE and "linear_attn" not in name else 1.0
    if name.endswith(".D"):
        return 0.3, 1.0
    if name.endswith(("A_log", "dt_bias")):
        # Nine of ten decays lie between 0.4 and 0.99, so states reach over many tokens.
        return (0.8, -1.5) if name.endswith("A_log") else (0.6, 0.0)
    if name.endswith(("bias", "sinks")):
        return 0.3, 0.0
    if name.endswith(("wpe.weight", "embed_positions.weight")):
        return 0.7, 0.0
    if any(part in name for part in ("embed_tokens", "embed_in", "word_embeddings", "wte", "tok_embeddings")):
        # With the same matrix at both ends, small embeddings keep the model from repeating a token.
        deviation = 0.25 if config.tie_word_embeddings else 1.0
        is_scaled = "gemma" in config.model_type or config.model_type in ("afmoe", "biogpt", "xglm")
        scale = config.hidden_size**0.5 if is_scaled else 1.0
        return deviation / getattr(config, "embedding_multiplier", scale), 0.0
    gain = 1.3
    if name.endswith(("gate.weight", "router.weight", "router.layer.weight", "classifier.weight")):
        gain = 2.0
    elif any(part in name for part in ("lm_head", "q_proj", "k_proj", "query_key_value", "c_attn", "qkv")):
        gain = 1.0 if config.model_type == "gpt_neo" else 2.0  # its attention has no scale
        if config.model_type.startswith("zamba"):
            gain = 1.2  # a larger scale
    elif "adapter_list" in name:
        gain = 0.8
    # (expert, in, out), or (in, out)
    is_transposed = len(shape) == 3 and config.model_type in ("gpt_oss", "llama4_text", "aria_text")
    is_transposed = is_transposed or (config.model_type == "gpt2" and "transformer.h." in name)
    return gain / shape[-2 if is_transposed else -1] ** 0.5, 0.0


def make_model(fields, folder, seed):
    """Saves a random model in bfloat16."""
    config = AutoConfig.for_model(**json.loads(json.dumps(fields)))
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    in_float = (*(model._keep_in_fp32_modules_strict or ()), *IN_FLOAT.get(config.model_type, ()))
    tensors = dict(model.named_parameters())
    tensors.update((n, b) for n, b in model.named_buffers() if n in model.state_dict() and not n.endswith(LIGHTNING))
    with torch.no_grad():
        for name, tensor in tensors.items():
            deviation, mean = spread(name, tensor.shape, config)
            values = mean + deviation * torch.randn(tensor.shape, generator=generator)
            tensor.data = values if any(part in name for part in in_float) else values.bfloat16()
    config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    if folder.name in FUSED_EXPERTS:
        fuse_experts(model, folder / "model.safetensors")
    if config.model_type == "olmo_hybrid":
        split_convolutions(model, folder / "model.safetensors")
    if config.model_type == "minimax":
        drop_tensors(folder / "model.safetensors", LIGHTNING)
    if config.model_type == "kimi_linear":
        rename_dense_parts(model, folder / "model.safetensors")
    if folder.name in WITHOUT_LAYER_TYPES:
        path = folder / "config.json"
        saved = json.loads(path.read_text())
        del saved["layer_types"]
        path.write_text(json.dumps(saved, indent=2) + "\n")


def kv_heads(config):
    if config.model_type == "falcon":
        return config.num_kv_heads if config.new_decoder_architecture else 1
    if config.model_type == "dbrx":
        return config.attn_config.kv_n_heads
    if hasattr(config, "kv_lora_rank"):
        return 1
    if config.model_type.startswith("gemma4"):
        return config.per_layer_config[FULL].num_key_value_heads
    # The number of query heads may be one of each layer.
    return config.num_key_value_heads if hasattr(config, "num_key_value_heads") else config.num_attention_heads


def make_surrogate(config, folder, seed):
    """Saves a random surrogate in float32. Its scores are about normally distributed."""
    generator = torch.Generator().manual_seed(seed + 1)
    torch.manual_seed(seed)
    layers, heads = config.num_hidden_layers, kv_heads(config)
    inputs = getattr(config, "attention_hidden_size", config.hidden_size)
    model = KVzapModel(KVzapConfig(input_dim=inputs, output_dim=heads, n_modules=layers))
    with torch.no_grad():
        for parameter in model.parameters():
            scale = inputs**-0.5 if parameter.dim() == 2 else 0.3
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="exact", experts_implementation="eager"
    ).eval()
    if model.config.model_type == "olmo3":
        with_default_layer_type(model.model.rotary_emb)
    if model.config.model_type in OTHER_PARTS:
        rename_parts(model, *OTHER_PARTS[model.config.model_type])
    # kvpress reads the query heads of the layers that it prunes here: those of full layers.
    model.config.allow_global_per_layer_attribute_access = True
    # kvpress finds the heads of the cache here; the layers of a model with latents do not look again.
    model.config.num_key_value_heads = kv_heads(model.config)
    for module in model.modules():
        # It chooses all tokens of texts as short as these. Its keys are not pruned with the rows.
        if hasattr(module, "indexer") and module.indexer is not None:
            module.indexer.forward = lambda *arguments, **named: None
    if model.config.model_type == "dbrx":
        for module in model.modules():
            if type(module).__name__ == "DbrxRouter":
                module.top_k = model.config.ffn_config.moe_top_k
    if model.config.model_type == "nemotron_h":
        for block in model.model.layers:
            if block.block_type == "full_attention":
                block.self_attn = block.mixer
    if model.config.model_type == "longcat_flash":
        model.model.layers = LayersOfParts(model.model.layers)
    if model.config.model_type.startswith("zamba"):
        for layer, block in enumerate(model.model.layers):
            shared = getattr(block, "shared_transf", getattr(block, "shared_transformer", None))
            if shared is not None:  # a module of its own, with common weights
                block.self_attn = shared.self_attn
                block.self_attn.layer_idx = layer
    if hasattr(model.model, "pos_emb"):
        model.model.rotary_emb = model.model.pos_emb
    accept_newer_names(model)
    return model


class LayersOfParts(torch.nn.ModuleList):
    """Layers with two attention parts each: one after the other for all who walk through the list, as kvpress does.

    The model takes a slice of the list, which has the layers.
    """

    def __iter__(self):
        for layer in super().__iter__():
            yield from (types.SimpleNamespace(self_attn=attention) for attention in layer.self_attn)

    def __getitem__(self, index):
        return (list(self._modules.values()) if isinstance(index, slice) else list(self))[index]


def with_default_layer_type(rotary):
    """Gives kvpress, which knows one RoPE for all layers, that of the layers it prunes."""
    forward = rotary.forward
    rotary.forward = lambda x, position_ids, layer_type="full_attention": forward(x, position_ids, layer_type)


# The names of the model, its layers and their attention, where they are not model, layers and self_attn.
OTHER_PARTS = {
    "gpt_neox": ("gpt_neox", "layers", "attention"),
    "falcon": ("transformer", "h", "self_attention"),
    "gpt2": ("transformer", "h", "attn"),
    "gpt_bigcode": ("transformer", "h", "attn"),
    "gptj": ("transformer", "h", "attn"),
    "codegen": ("transformer", "h", "attn"),
    "xglm": ("model", "layers", "self_attn"),
    "gpt_neox_japanese": ("gpt_neox_japanese", "layers", "attention"),
    "modernbert-decoder": ("model", "layers", "attn"),
    "dbrx": ("transformer", "blocks", "norm_attn_norm.attn"),
    "gpt_neo": ("transformer", "h", "attn.attention"),
    "opt": ("model.decoder", "layers", "self_attn"),
    "biogpt": ("biogpt", "layers", "self_attn"),
}
# One map for queries, keys and values.
ONE_MAP = ("gpt_neox", "falcon", "gpt2", "gpt_bigcode", "persimmon", "codegen", "dbrx", "gpt_neox_japanese")


def rename_parts(model, decoder, layers, attention):
    """Gives a model the names of parts and arguments that kvpress expects."""

    def by_name(module, args, kwargs):
        if args:
            kwargs = {**kwargs, "hidden_states": args[0]}
        if "layer_past" in kwargs:
            kwargs["past_key_values"] = kwargs["layer_past"]
        return (), kwargs

    parts = operator.attrgetter(decoder)(model)
    if "." in decoder:
        object.__setattr__(parts, decoder.split(".")[1], parts)  # the class looks for it there
    model.model = parts
    model.model.layers = getattr(model.model, layers)
    model.model.rotary_emb = getattr(model.model, "rotary_emb", None)
    model.config.num_key_value_heads = kv_heads(model.config)
    for block in model.model.layers:
        block.self_attn = operator.attrgetter(attention)(block)
        block.self_attn.config = model.config
        block.self_attn.head_dim = model.config.hidden_size // model.config.num_attention_heads
        block.self_attn.register_forward_pre_hook(by_name, with_kwargs=True)


def layer_windows(config):
    """Of each layer: the window or the length of chunks; 0 if it sees all tokens."""
    sizes = {
        "sliding_attention": getattr(config, "sliding_window", None),
        "chunked_attention": getattr(config, "attention_chunk_size", None),
    }
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "gpt_neo":
        return [config.window_size if kind == "local" else 0 for kind in config.attention_layers]
    if kinds is None:  # one window for all layers
        kinds = ["sliding_attention"] * config.num_hidden_layers
    return [sizes.get(kind) or 0 for kind in kinds]


def full_layers(config):
    """The layers with attention that sees all tokens, and with pairs of their own. Only these are pruned."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    layers = enumerate(zip(kinds[:own], layer_windows(config)))
    return [layer for layer, (kind, window) in layers if window == 0 and kind not in WITHOUT_ATTENTION]


def pair_layers(model):
    """The attention of each layer that has pairs in the cache, by the layer's index."""
    layers = attention_layers(model).items()
    return {i: attention for i, attention in layers if not getattr(attention, "is_kv_shared_layer", False)}


# ---- Runs ---------------------------------------------------------------------------------------


# Of each kind of layers: masked pairs in the last layer with pairs of its own, before its press changed them.
SEEN_BY_OTHERS = {}


def family_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """exact_attention, with windows, chunks, caps of scores and sinks.

    A layer that reads another one's pairs sees those that the other saw in the same pass.
    """
    if getattr(module, "is_kv_shared_layer", False):
        module.masked_key_indices = SEEN_BY_OTHERS[module.layer_type]
    elif getattr(module, "store_full_length_kv", False):
        is_prompt = query.shape[2] == key.shape[2]
        SEEN_BY_OTHERS[module.layer_type] = None if is_prompt else module.masked_key_indices
    config, softcap, sinks = module.config, kwargs.get("softcap"), kwargs.get("s_aux")
    window = kwargs.get("sliding_window")
    kinds = getattr(config, "layer_types", None)
    is_chunked = kinds is not None and kinds[module.layer_idx] == "chunked_attention"
    if not window and softcap is None and sinks is None and not is_chunked:
        output, weights = exact_attention(module, query, key, value, attention_mask, scaling, **kwargs)
        return output.contiguous(), weights
    group, n_queries, n_keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    if n_queries == n_keys:
        module.masked_key_indices = None  # the prompt: as in exact_attention
    scores = query @ key.repeat_interleave(group, dim=1).transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # Layers with windows or chunks have the rows of all tokens: a row's index is its position.
    keys = torch.arange(n_keys)
    queries = keys[n_keys - n_queries :].unsqueeze(1)
    seen = keys <= queries
    if window:
        seen &= keys > queries - window
    if is_chunked:
        seen &= keys // config.attention_chunk_size == queries // config.attention_chunk_size
    scores = scores.masked_fill(~seen, float("-inf"))
    if module.masked_key_indices is not None:
        assert not window and not is_chunked
        masked = torch.zeros(key.shape[:3], dtype=torch.bool)
        masked[tuple(module.masked_key_indices)] = True
        masked = masked.repeat_interleave(group, dim=1).unsqueeze(2)
        scores = scores.masked_fill(masked, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., :n_keys]
    output = (weights @ value.repeat_interleave(group, dim=1)).transpose(1, 2).contiguous()
    return output, weights if make_policy_goldens.WANTS_WEIGHTS else None


class FalconAttention(modeling_falcon.FalconAttention):
    """Falcon's attention with one pair for each KV head in the cache, and without ALiBi.

    The class of transformers stores the pair of a KV head once for each query head.
    """

    def forward(self, hidden_states, layer_past=None, position_embeddings=None, **kwargs):
        heads, group = self.num_kv_heads, self.num_heads // self.num_kv_heads
        rows = self.query_key_value(hidden_states).unflatten(2, (heads, group + 2, self.head_dim))
        query = rows[..., :group, :].flatten(2, 3).transpose(1, 2)
        key, value = rows[..., group, :].transpose(1, 2), rows[..., group + 1, :].transpose(1, 2)
        query, key = modeling_falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
        key, value = layer_past.update(key, value, self.layer_idx)
        output, weights = family_attention(self, query, key, value, None, self.inv_norm_factor)
        return self.dense(output.flatten(2)), weights


modeling_falcon.FALCON_ATTENTION_CLASSES["exact"] = FalconAttention


def evicted_pairs(model, cache):
    """(layer, KV head, token): 1 where the pair is masked; 0 in layers that are not pruned."""
    full = full_layers(model.config)
    mask = torch.zeros((model.config.num_hidden_layers, *cache.layers[full[0]].keys.shape[1:3]), dtype=torch.uint8)
    for layer in full:
        masked = attention_layers(model)[layer].masked_key_indices
        if masked is not None:
            mask[layer][tuple(masked[1:])] = 1
    return mask


class GPTNeoAttention(modeling_gpt_neo.GPTNeoSelfAttention):
    """GPT-Neo's attention, which has no interface for another one."""

    def __init__(self, config, attention_type, layer_id=None):
        super().__init__(config, attention_type, layer_id)
        self.layer_idx = layer_id

    def forward(self, hidden_states, layer_past=None, **kwargs):
        maps = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (self._split_heads(part(hidden_states), self.num_heads, self.head_dim) for part in maps)
        key, value = layer_past.update(key, value, self.layer_idx)
        window = self.config.window_size if self.attention_type == "local" else None
        output, weights = family_attention(self, query, key, value, None, 1.0, sliding_window=window)
        return self.out_proj(output.flatten(2)), weights


modeling_gpt_neo.GPT_NEO_ATTENTION_CLASSES["exact"] = GPTNeoAttention


class XGLMAttention(modeling_xglm.XGLMAttention):
    """XGLM's attention, which has no interface for another one."""

    def forward(self, hidden_states, cache=None, **kwargs):
        maps = (self.q_proj, self.k_proj, self.v_proj)
        heads = [part(hidden_states).unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for part in maps]
        key, value = cache.update(heads[1], heads[2], self.layer_idx)
        output, weights = family_attention(self, heads[0], key, value, None, self.scaling)
        return self.out_proj(output.flatten(2)), weights


modeling_xglm.XGLMAttention = XGLMAttention


class GPTNeoXJapaneseAttention(modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention):
    """GPT-NeoX Japanese's attention, which has no interface for another one."""

    def forward(self, hidden_states, layer_past=None, position_embeddings=None, **kwargs):
        rows = self.query_key_value(hidden_states).unflatten(2, (self.num_attention_heads, 3, self.head_size))
        query, key, value = (part.transpose(1, 2) for part in rows.unbind(3))
        turn = modeling_gpt_neox_japanese.apply_rotary_pos_emb
        turned = turn(query[..., : self.rotary_ndims], key[..., : self.rotary_ndims], *position_embeddings)
        query, key = (
            torch.cat((own, whole[..., self.rotary_ndims :]), dim=-1) for own, whole in zip(turned, (query, key))
        )
        key, value = layer_past.update(key, value, self.layer_idx)
        output, weights = family_attention(self, query, key, value, None, self.head_size**-0.5)
        return self.dense(output.flatten(2)), weights, self.dense_bias


modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention = GPTNeoXJapaneseAttention


class CountingCache(DynamicCache):
    """Counts tokens, not rows: transformers' Llama 4 derives the positions of queries from this number."""

    tokens = 0

    def get_seq_length(self, layer_idx=0):
        return self.tokens


def make_cache(model):
    if model.config.model_type == "llama4_text":
        return CountingCache()
    if model.config.model_type == "minimax":
        return MiniMaxCache()
    # Plain layers, whose rows are those of all tokens in layers with a window too.
    kinds = getattr(model.config, "layer_types", None) or []
    has_states = any(kind in (*WITHOUT_ATTENTION, "hybrid") for kind in kinds)
    return HybridCache(model.config) if has_states else DynamicCache()


@torch.no_grad()
def run(model, prompt, margins, press=None, decoding_press=None):
    """Greedy ids, the logits that chose them, the cache, and pairs masked after the prompt."""
    for attention in attention_layers(model).values():
        attention.masked_key_indices = None
    cache, ids, logits, step, position = make_cache(model), [], [], prompt, 0
    after_prompt = None
    while True:
        active = press if position == 0 else decoding_press
        positions = torch.arange(position, position + len(step))
        with attached(active, model):
            output = model(
                torch.tensor([step]),
                past_key_values=cache,
                position_ids=positions.unsqueeze(0),
                cache_position=positions,
                logits_to_keep=1,
            )
        if position == 0 and isinstance(press, DMSPress):
            after_prompt = evicted_pairs(model, cache)
        position += len(step)
        cache.tokens = position
        logits.append(output.logits[0, -1])
        margins.cut("logits", logits[-1], 1)
        step = [int(logits[-1].argmax())]
        ids += step
        if len(ids) == NEW_TOKENS:
            return torch.tensor(ids, dtype=torch.int32), torch.stack(logits), cache, after_prompt


def skip_windows(press, config):
    """Makes a press leave layers alone that are not pruned; kvpress leaves windows for Gemma 3 only."""
    hook, full = press.forward_hook, full_layers(config)

    def wrapper(module, args, kwargs, output):
        return hook(module, args, kwargs, output) if module.layer_idx in full else output

    press.forward_hook = wrapper


def watched(score, scores):
    """press.score; appends its results to the list."""

    def wrapper(module, hidden_states, keys, values, attentions, kwargs):
        scores.append(score(module, hidden_states, keys, values, attentions, kwargs))
        return scores[-1]

    return wrapper


@torch.no_grad()
def choose_threshold(surrogate, inputs):
    """The middle of the widest gap between the prompt's scores, which evicts about 45 %.

    `inputs` has the input of attention of each layer that is pruned.
    """
    scores = torch.cat([surrogate.layers[i](hidden[:-WINDOW]).flatten() for i, hidden in inputs.items()])
    ordered = scores.sort().values
    first, last = int(0.4 * len(ordered)), int(0.5 * len(ordered))
    widest = first + int(ordered[first : last + 1].diff().argmax())
    return round(float(ordered[widest : widest + 2].mean()), 4)


def pruned_runs(model, folder, prompt, margins, threshold, tensors):
    """Runs with the surrogate: their entries of golden.json; their tensors go to `tensors`."""
    runs, full = {}, full_layers(model.config)
    for mode in ("prefill", "decode"):
        name = f"kvzap-linear.tau{threshold}.w{WINDOW}.{mode}"
        scorer, scores = KVzapPress(model_type="linear"), []
        scorer.post_init_from_model = lambda model: None
        scorer.kvzap_model = KVzapModel.from_pretrained(folder / "kvzap-linear")
        scorer.score = watched(scorer.score, scores)
        press = DMSPress(scorer, threshold, WINDOW, mode == "decode")
        skip_windows(press, model.config)
        decoding = press if mode == "decode" else None
        ids, logits, cache, after_prompt = run(model, prompt, margins, press, decoding)
        margins.threshold(torch.cat([part.flatten() for part in scores]), threshold)
        tensors[f"{name}.generated"], tensors[f"{name}.logits"] = ids, logits
        tensors[f"{name}.evicted_after_prefill"] = after_prompt
        runs[name] = {"evict_ratio_after_prefill": float(after_prompt[full].double().mean())}
        if decoding is not None:
            at_end = evicted_pairs(model, cache)
            tensors[f"{name}.evicted_at_end"] = at_end
            runs[name]["evict_ratio_at_end"] = float(at_end[full].double().mean())
    return runs


# ---- Policies -----------------------------------------------------------------------------------


def query_states(module, hidden_states):
    """kvpress' get_prerope_query_states, which normalises the queries of Qwen3 and Gemma 3 alone."""
    states = module.q_proj(hidden_states)
    limit = getattr(module.config, "clip_qkv", None)
    if limit is not None:
        states = states.clamp(-limit, limit)
    norm = getattr(module, "q_norm", getattr(module, "q_layernorm", None))
    whole = norm is not None and norm.weight.numel() != module.head_dim
    if whole:
        states = norm(states)
    limit = getattr(module.config, "clip_qkv", None)
    if limit is not None:
        states = states.clamp(-limit, limit)
    states = states.view(*hidden_states.shape[:2], -1, module.head_dim)
    if norm is not None and not whole:
        states = norm(states)
    return states.transpose(1, 2)


def why_not_expected_attention(config):
    """Why kvpress' press does not fit a model, if so."""
    if config.model_type in ONE_MAP:
        return "kvpress expects a map of queries alone"
    if hasattr(config, "kv_lora_rank"):
        return "kvpress expects queries and keys of the same dimensions"
    if config.model_type.startswith("zamba"):
        return "kvpress scales scores by the root of head_dim"
    if config.model_type == "lfm3":
        return "kvpress knows one RoPE for all layers"
    if config.model_type.startswith(("gemma4", "gemma3n")):
        return "kvpress scales scores by the root of head_dim"
    if config.model_type == "nemotron_h":
        return "kvpress rotates the queries of layers without RoPE"
    if config.model_type in ("mimo_v2_flash", "laguna", "step3p5", "modernbert-decoder"):
        return "kvpress knows one RoPE for all layers"
    if config.model_type in INTERLEAVED:
        return "kvpress rotates halves of heads"
    if config.model_type in WITHOUT_ROPE:
        return "kvpress rotates the queries of layers without RoPE"
    if config.rope_parameters.get("partial_rotary_factor", 1.0) < 1:
        return "kvpress rotates whole heads"
    if config.rope_parameters["rope_type"] in ("longrope", "dynamic"):
        return "kvzap turns nothing to positions whose frequencies depend on the length"
    if config.model_type.startswith("hunyuan") or config.model_type == "nanochat":
        return "kvpress does not know norms of queries after RoPE"
    if config.model_type == "mellum":
        return "kvpress knows one RoPE for all layers"
    if config.model_type in FULL_WITHOUT_ROPE or not all(getattr(config, "no_rope_layers", None) or [1]):
        return "kvpress rotates the queries of layers without RoPE"
    if config.model_type in ("gpt_oss", "flint"):
        return "kvpress has no sinks in its softmax"
    if config.model_type == "granitemoehybrid" and config.position_embedding_type != "rope":
        return "kvpress rotates the queries of layers without RoPE"
    if config.model_type == "falcon_h1":
        return "kvpress does not know factors of keys"
    scalar = getattr(config, "query_pre_attn_scalar", None)
    if hasattr(config, "attention_multiplier") or (scalar is not None and scalar != config.head_dim):
        return "kvpress scales scores by the root of head_dim"
    if "llama_4_scaling_beta" in config.rope_parameters:
        return "kvpress does not scale queries by their position"
    return None


def compress_latents(press):
    """ScorerPress.compress for values of other dimensions than keys, as latents and keys of RoPE are."""

    def compress(module, hidden_states, keys, values, attentions, kwargs):
        scores = press.score(module, hidden_states, keys, values, attentions, kwargs)
        n_kept = compute_n_kept(keys.shape[2], press.compression_ratio)
        kept = scores.topk(n_kept, dim=-1).indices.unsqueeze(-1)
        return tuple(rows.gather(2, kept.expand(-1, -1, -1, rows.shape[-1])) for rows in (keys, values))

    press.compress = compress


def policy_runs(model, prompt, margins, tensors):
    """Runs of policies: entries of golden.json, and the reason for each that is left out."""
    presses = [("knorm", KnormPress(EVICT_RATIO), 0, 0), ("snapkv:window=8", SnapKVPress(EVICT_RATIO, 8), 0, 8)]
    reason, full = why_not_expected_attention(model.config), full_layers(model.config)
    if reason is None:
        presses.append(("expected-attention", ExpectedAttentionPress(EVICT_RATIO), 4, 0))
    if reason is not None or len(full) < model.config.num_hidden_layers:
        presses.append(("keydiff", KeyDiffPress(EVICT_RATIO), 0, 0))
    left_out = {} if reason is None else {"expected-attention": reason}
    if model.config.model_type == "nanochat":
        left_out["knorm"] = "all keys have the same norm"
    runs = []
    for policy, press, first, last in presses:
        if policy in left_out:
            continue
        scores = []
        skip_windows(press, model.config)
        press.score = watched(press.score, scores)
        if hasattr(model.config, "v_head_dim"):
            compress_latents(press)
        # SnapKV takes the model's own attention, which has its scale and norms, instead of computing
        # attention from hidden states.
        weights = mock.patch.object(make_policy_goldens, "WANTS_WEIGHTS", policy.startswith("snapkv"))
        queries = mock.patch.object(expected_attention_press, "get_prerope_query_states", query_states)
        with weights, queries:
            ids, _, cache, _ = run(model, prompt, margins, press)
        scores = torch.cat(scores)
        n_kept = compute_n_kept(len(prompt), EVICT_RATIO)
        for i in pair_layers(model):
            rows = n_kept if i in full else len(prompt)
            assert cache.layers[i].keys.shape[2] == rows + NEW_TOKENS - 1
        # Expected attention makes scores of any size by an exponential.
        scores_inside = scores[..., first : len(prompt) - last]
        margins.cut("cut", scores_inside, n_kept - first - last, policy == "expected-attention")
        chosen = torch.zeros(scores.shape, dtype=torch.uint8)
        chosen.scatter_(2, scores.topk(n_kept, dim=-1).indices, 1)
        kept = torch.ones((model.config.num_hidden_layers, *scores.shape[1:]), dtype=torch.uint8)
        kept[full] = chosen
        tensors[f"{policy}.kept"], tensors[f"{policy}.generated"] = kept, ids
        runs.append({"policy": policy, "evict_ratio": EVICT_RATIO})
    return runs, left_out


# ---- Files --------------------------------------------------------------------------------------


def make_goldens(folder, prompt, margins, prunes, threshold=None):
    """The runs of a model: fields of golden.json, and tensors."""
    model = load(folder)
    watch_routers(model, margins)
    tensors, runs, policies, left_out = {}, {"full": {}}, [], {}
    with watched_inputs(model) if prunes else contextlib.nullcontext([]) as inputs:
        ids, logits, _, _ = run(model, prompt, margins)
    tensors["full.generated"], tensors["full.logits"] = ids, logits
    different = len(set(ids.tolist()))
    if margins.enforced and different < DIFFERENT_IDS:
        raise TooClose(f"{different} different ids")
    if prunes:
        if threshold is None:
            surrogate = KVzapModel.from_pretrained(folder / "kvzap-linear")
            of_prompt = dict(zip(attention_layers(model), inputs))
            threshold = choose_threshold(surrogate, {i: of_prompt[i] for i in full_layers(model.config)})
        runs.update(pruned_runs(model, folder, prompt, margins, threshold, tensors))
        policies, left_out = policy_runs(model, prompt, margins, tensors)
    content = {"architecture": type(model).__name__, "new_tokens": NEW_TOKENS, "window": WINDOW}
    windows = layer_windows(model.config)
    if any(windows):
        content["windows"] = windows
    content.update(threshold=threshold, runs=runs, policies=policies, left_out=left_out)
    return content, tensors


def check_family(name):
    """What differs from the files that are there, and the largest deviation of a number."""
    folder = OUT / name
    old = json.loads((folder / "golden.json").read_text())
    margins = Margins(False)
    content, tensors = make_goldens(folder, old["prompt"], margins, len(old["runs"]) > 1, old["threshold"])
    found = [field for field in content if content[field] != old.get(field)]
    worst = 0.0
    expected = load_file(folder / "golden.safetensors")
    for key in sorted(expected.keys() | tensors.keys()):
        a, b = expected.get(key), tensors.get(key)
        if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
            found.append(key)
        elif a.dtype == torch.float32:
            deviation = float((a - b).abs().max() / a.abs().max())
            worst = max(worst, deviation)
            if deviation > TOLERANCE:
                found.append(f"{key} ({deviation:.1e})")
        elif not torch.equal(a, b):
            found.append(key)
    print(f"{name}: largest deviation {worst:.1e}, different: {', '.join(found) or 'nothing'}", flush=True)
    return not found


def make_family(name, fields):
    for seed in range(1, 100):
        prompt = torch.randperm(fields["vocab_size"], generator=torch.Generator().manual_seed(seed))
        prompt = prompt[:PROMPT_TOKENS].tolist()
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary) / name
            make_model(fields, folder, seed)
            config = AutoConfig.from_pretrained(folder)
            prunes = len(full_layers(config)) > 0
            if prunes:
                make_surrogate(config, folder / "kvzap-linear", seed)
            margins = Margins(True)
            try:
                content, tensors = make_goldens(folder, prompt, margins, prunes)
            except TooClose as close:
                print(f"{name}: not seed {seed}: {close}", flush=True)
                continue
            closest = {kind: float(f"{value:.2g}") for kind, value in margins.closest.items()}
            ratios = [round(r, 2) for entry in content["runs"].values() for r in entry.values()]
            content = {"family": name, "seed": seed, "margins": closest, "prompt": prompt, **content}
            save_file(tensors, folder / "golden.safetensors")
            (folder / "golden.json").write_text(to_json(content))
            for path in folder.rglob("*"):
                path.chmod(0o755 if path.is_dir() else 0o644)
            shutil.rmtree(OUT / name, ignore_errors=True)
            shutil.copytree(folder, OUT / name)
        sizes = [sum(p.stat().st_size for p in (OUT / name).rglob(f"{part}*")) for part in ("model", "golden")]
        counts = len(set(tensors["full.generated"].tolist()))
        print(f"{name}: seed {seed}, {sizes} bytes, {counts} different ids, evicted {ratios}, closest {closest}", flush=True)
        return
    sys.exit(f"{name}: no seed gives clear choices")


def to_json(content):
    """JSON with lists of numbers in one line."""
    text = json.dumps(content, indent=1)
    lines = []
    for line in text.split("\n"):
        if lines and lines[-1].endswith(("[", ",")) and line.strip().rstrip(",").lstrip("-").isdigit():
            lines[-1] += ("" if lines[-1].endswith("[") else " ") + line.strip()
        elif lines and lines[-1][-1:].isdigit() and line.strip() in ("]", "],"):
            lines[-1] += line.strip()
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", help="names, separated by commas (default: all)")
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, write nothing")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    AttentionInterface.register("exact", family_attention)
    # Attention does not read the mask; a layer with an indexer takes it apart.
    AttentionMaskInterface.register("exact", eager_mask)
    # Only the text models of other classes.
    AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
    AutoModelForCausalLM.register(Emu3TextConfig, Emu3ForCausalLM, exist_ok=True)
    AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
    name_published_tensors()
    names = arguments.families.split(",") if arguments.families else list(FAMILIES)
    if arguments.check:
        sys.exit(not all([check_family(name) for name in names]))
    for name in names:
        make_family(name, FAMILIES[name])


if __name__ == "__main__":
    main()
