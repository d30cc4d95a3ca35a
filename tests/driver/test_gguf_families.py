"""GGUF files of model families: a file gives the token ids of the folder that it was made from."""
import json
import math
import random
import struct
import unittest

from harness import KVZAP, SOURCE, TestCase, kvzap, read_safetensors, run_command, write_safetensors
from test_gguf import BF16, F32, text, value

try:
    import gguf
except ImportError:
    gguf = None

FAMILIES = SOURCE / "tests/golden/families"
# Folders, and their architectures in GGUF.
ARCHITECTURES = {
    "cohere2": "cohere2", "gemma2": "gemma2", "gemma3_text": "gemma3", "glm4": "glm4", "glm4_moe": "glm4moe", "gpt_oss": "gpt-oss",
    "granite": "granite", "llama4_text": "llama4", "minimax_m2": "minimax-m2", "ministral3": "mistral3", "mixtral": "llama",
    "olmo2": "olmo2", "olmo3": "olmo2", "phi3": "phi3", "qwen2_moe": "qwen2moe", "qwen3": "qwen3", "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3", "seed_oss": "seed_oss", "ernie4_5": "ernie4_5", "gemma": "gemma", "olmoe": "olmoe",
    "hunyuan_v1_dense": "hunyuan-dense", "dots1": "dots1", "cohere": "command-r",
    "arcee": "arcee", "falcon": "falcon", "falcon_multi_query": "falcon", "gpt_neox": "gptneox", "nemotron": "nemotron",
    "olmo": "olmo", "phi": "phi2", "stablelm": "stablelm", "starcoder2": "starcoder2",
    "granitemoe": "granitemoe", "granitemoeshared": "granitemoe", "glm": "chatglm", "exaone4": "exaone4", "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_moe": "hunyuan-moe", "gpt2": "gpt2", "gpt_bigcode": "starcoder", "jais2": "jais2", "cohere_norms": "command-r",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2", "youtu": "deepseek2", "mistral4": "mistral4",
    "minicpm3": "minicpm3", "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "granitemoehybrid": "granitehybrid",
    "granitemoehybrid_dense": "granitehybrid", "falcon_h1": "falcon-h1", "nemotron_h": "nemotron_h_moe", "nemotron_h_dense": "nemotron_h",
    "exaone_moe": "exaone-moe", "afmoe": "afmoe", "hy_v3": "hy_v3", "bitnet": "bitnet", "apertus": "apertus",
    "gemma3n": "gemma3n", "gemma4": "gemma4", "gemma4_moe": "gemma4", "gemma4_unified": "gemma4",
    "jamba": "jamba", "exaone": "exaone", "dbrx": "dbrx", "phimoe": "phimoe",
    "mimo_v2_flash": "mimo2", "mimo_v2_full": "mimo2", "step3p7": "step35", "mellum": "mellum", "solar_open": "glm4moe",
}
# Further models of a folder.
FOLDERS = {"nemotron_h_dense": "nemotron_h"}
# Tensors that the package's list of an architecture lacks.
UNLISTED = {"command-r": ("blk.{}.attn_q_norm", "blk.{}.attn_k_norm"), "lfm2moe": ("output",),
            "gemma4": ("blk.{}.ffn_gate_exps", "blk.{}.ffn_up_exps")}
# Fields of folders with settings that the architecture fixes in GGUF.
FIXED = {
    "gemma2": {"query_pre_attn_scalar": 16}, "gemma3_text": {"query_pre_attn_scalar": 16},
    "llama4_text": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "no_rope_layers": [1, 1, 1, 0],
                    "layer_types": ["chunked_attention"] * 3 + ["full_attention"]},
    "dots1": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "exaone4": {"sliding_window": None, "sliding_window_pattern": 0, "layer_types": ["full_attention"] * 4},
    "olmoe": {"clip_qkv": None},
    "hunyuan_v1_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "deepseek_v3": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "mscale": 0.9, "mscale_all_dim": 0.9,
                                        "original_max_position_embeddings": 64}},
    "glm4_moe_lite": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "minicpm3": {"scale_emb": 12, "dim_model_base": 256},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention"] * 4},
    "youtu": {"rope_interleave": True},
    "gemma3n": {"layer_types": [f"{kind}_attention" for kind in "full sliding sliding full sliding full sliding".split()]},
    "gemma4": {"layer_types": [f"{kind}_attention" for kind in "full sliding full sliding full sliding full full".split()],
               "per_layer_config": {str(layer): {"head_dim": 24} for layer in (0, 2, 4, 6, 7)}},
    "afmoe": {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "bitnet": {"hidden_act": "silu"},
    "mimo_v2_full": {"n_group": 1, "topk_group": 1},
    "mellum": {"mlp_layer_types": ["sparse"] * 4, "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 500000.0}
                                                                      for kind in ("full_attention", "sliding_attention")}},
    "phimoe": {"router_jitter_noise": 0.01},
    "arcee": {"mlp_bias": False},
    "cohere_norms": {"num_hidden_layers": 64},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "granitemoehybrid": {"mamba_conv_bias": True},
    "falcon_h1": {"mamba_norm_before_gate": False, "embedding_multiplier": 1.0, "lm_head_multiplier": 1.0, "key_multiplier": 1.0,
                  "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0, "mlp_multipliers": [1.0, 1.0],
                  "ssm_multipliers": [1.0] * 5},
    "nemotron_h": {"layers_block_type": ["moe", "linear_attention", "full_attention", "moe", "linear_attention", "full_attention", "moe"]},
    "nemotron_h_dense": {"layers_block_type": ["mlp", "linear_attention", "full_attention", "mlp", "linear_attention", "full_attention",
                                               "mlp"]},
}
# Layers that take the place of others, as the format fixes which ones have experts or RoPE.
LAYERS = {"smollm3": [(1, 3)], "mellum": [(0, 1)], "glm4_moe_lite": [(1, 2)], "gemma4": [(2, 4)], "nemotron_h": [(0, 3)], "nemotron_h_dense": [(3, 0), (3, 6)],
          "cohere_norms": [(layer % 3, layer) for layer in range(3, 64)]}
# Biases that the architecture lacks in GGUF: their field, and the ends of their names.
BIASES = {"mimo_v2_flash": ("attention_bias", ".bias"), "arcee": ("attention_bias", ".bias"), "seed_oss": ("attention_out_bias", "o_proj.bias"), "ernie4_5": ("use_bias", ".bias"), "cohere": ("attention_bias", ".bias"),
          "deepseek_v3": ("attention_bias", ("proj.bias", "mqa.bias")), "granitemoehybrid": ("mamba_proj_bias", "proj.bias"),
          "lfm2": ("conv_bias", ("conv.bias", "proj.bias")), "nemotron_h": ("use_bias", "proj.bias"),
          "nemotron_h_dense": ("use_bias", "proj.bias")}
VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
MXFP4 = 39  # a type of tensors
TENSOR_BYTES = {F32: 4, BF16: 2}


class Gguf:
    """A GGUF file in parts: {key: type and value as bytes}, and {name: (type, shape with the slowest first, bytes)}."""

    def __init__(self, path):
        self.raw, self.at = path.read_bytes(), 8
        tensors, values = self.take("<QQ")
        self.values, self.tensors = {}, {}
        for _ in range(values):
            key, begin = self.string(), self.at
            self.skip_value(*self.take("<I"))
            self.values[key] = self.raw[begin:self.at]
        infos = []
        for _ in range(tensors):
            name, (count,) = self.string(), self.take("<I")
            infos.append((name, list(reversed(self.take(f"<{count}Q"))), *self.take("<IQ")))
        data = (self.at + 31) // 32 * 32
        for name, shape, kind, offset in infos:
            size = TENSOR_BYTES[kind]
            for extent in shape:
                size *= extent
            self.tensors[name] = (kind, shape, self.raw[data + offset:data + offset + size])

    def take(self, kinds):
        values = struct.unpack_from(kinds, self.raw, self.at)
        self.at += struct.calcsize(kinds)
        return values

    def string(self):
        (size,) = self.take("<Q")
        self.at += size
        return self.raw[self.at - size:self.at].decode()

    def skip_value(self, kind):
        if kind == 9:
            kind, count = self.take("<IQ")
            for _ in range(count):
                self.skip_element(kind)
        else:
            self.skip_element(kind)

    def skip_element(self, kind):
        if kind == 8:
            self.string()
        else:
            self.at += VALUE_BYTES[kind]

    def set(self, key, item):
        self.values[key] = value(item)

    def write(self, path):
        header = struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self.values))
        header += b"".join(text(key) + item for key, item in self.values.items())
        data = b""
        for name, (kind, shape, content) in self.tensors.items():
            header += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(data))
            data += content + b"\0" * (-len(content) % 32)
        path.write_bytes(header + b"\0" * (-len(header) % 32) + data)
        return path


def golden(name):
    """The prompt of a golden run, and the ids that follow."""
    prompt = json.loads((FAMILIES / name / "golden.json").read_text())["prompt"]
    _, shape, data = read_safetensors(FAMILIES / name / "golden.safetensors")["full.generated"]
    return prompt, list(struct.unpack(f"<{shape[0]}i", data))


def bf16_values(data):
    return [struct.unpack("<f", b"\0\0" + data[i:i + 2])[0] for i in range(0, len(data), 2)]


def mxfp4_blocks(count, seed):
    source = random.Random(seed)
    return [bytes([source.randint(121, 124)]) + source.randbytes(16) for _ in range(count)]


def mxfp4_values(block):
    """A block's exponent, and 32 floats of 4 bits: the low halves of all bytes, then the high ones."""
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    table += [-item for item in table]
    codes = [byte & 15 for byte in block[1:]] + [byte >> 4 for byte in block[1:]]
    return struct.pack("<32f", *(table[code] * 2.0 ** (block[0] - 127) for code in codes))


def random_values(count, scale, seed):
    """Values of type BF16."""
    source = random.Random(seed)
    return b"".join(struct.pack("<f", source.gauss(0, scale))[2:] for _ in range(count))


class Families(TestCase):
    def command(self, *arguments):
        done = run_command([KVZAP, *arguments])
        self.assertEqual(done.code, 0, done)
        return done

    def convert(self, model, name):
        output = self.folder / name
        self.command("convert", "-m", model, "-o", output)
        return output

    def ids(self, model, prompt, *flags, ranks=0):
        """24 greedy tokens after the prompt."""
        done = self.succeed("-m", model, "--token-ids", "-p", " ".join(map(str, prompt[:-1])), "--question", prompt[-1], "-n", 24,
                            "--greedy-plain", "--ignore-eos", "--dtype", "f32", "-q", *flags, ranks=ranks)
        return list(map(int, done.text.split()))

    def folder_of(self, name):
        """The golden folder, or one that the format can hold."""
        if name not in FIXED and name not in BIASES:
            return FAMILIES / FOLDERS.get(name, name)
        field, ends = BIASES.get(name, (None, ()))
        folder = self.copy(FAMILIES / FOLDERS.get(name, name), name, **FIXED.get(name, {}), **({field: False} if field else {}))
        tensors = {key: item for key, item in read_safetensors(folder / "model.safetensors").items() if not key.endswith(ends)}
        for pair in LAYERS.get(name, ()):
            source, target = (f"{'backbone' if name.startswith('nemotron_h') else 'model'}.layers.{layer}." for layer in pair)
            tensors = {key: item for key, item in tensors.items() if not key.startswith(target)}
            tensors.update({key.replace(source, target): item for key, item in tensors.items() if key.startswith(source)})
        if name == "granitemoehybrid":  # files need a bias of each convolution
            tensors.update({key.replace("weight", "bias"): ("BF16", shape[:1], random_values(shape[0], 0.2, key))
                            for key, (_, shape, _) in tensors.items() if key.endswith("conv1d.weight")})
        for key, (dtype, shape, data) in tensors.items():
            if dtype == "F32" and key.endswith("mixer.gate.weight"):  # a folder made of a file has BF16
                tensors[key] = "BF16", shape, b"".join(data[i + 2:i + 4] for i in range(0, len(data), 4))
        write_safetensors(folder / "model.safetensors", tensors)
        return folder

    def test_golden_ids(self):
        """A folder, the file made of it, and the folder made of that give the same ids."""
        for name in ARCHITECTURES:
            with self.subTest(name=name):
                folder = self.folder_of(name)
                prompt, expected = golden(FOLDERS.get(name, name))
                if name in FIXED or name in BIASES:
                    expected = self.ids(folder, prompt)
                file = self.convert(folder, f"{name}.gguf")
                self.assertEqual(Gguf(file).values["general.architecture"], value(ARCHITECTURES[name]))
                self.assertEqual(self.ids(file, prompt), expected)
                back = self.convert(file, f"{name}-back")
                self.assertEqual(self.ids(back, prompt), expected)
                before, after = (read_safetensors(model / "model.safetensors") for model in (folder, back))
                fused = name in ("mistral4", "gemma4_moe")
                if not fused:  # their folders have one tensor for all experts; kvzap writes one for each
                    self.assertEqual(set(before), set(after))
                for key, (dtype, shape, data) in after.items():
                    if fused and ".experts." in key or key.endswith("_per_layer.weight") and name == "gemma3n":  # has a row for each token
                        continue
                    self.assertEqual(shape, before[key][1])
                    if key.endswith("A_log"):  # the file holds -exp(A_log)
                        for a, b in zip(struct.unpack(f"<{math.prod(shape)}f", data), bf16_values(before[key][2])):
                            self.assertAlmostEqual(a, b, delta=1e-6)
                    elif (name.startswith("gemma") or name == "nemotron") and key.endswith("norm.weight"):  # the file holds 1 + weight as F32
                        for a, b in zip(bf16_values(data), bf16_values(before[key][2])):
                            self.assertAlmostEqual(a, b, delta=1e-7)
                    elif dtype == before[key][0]:
                        self.assertEqual(data, before[key][2], key)
                    elif dtype == "BF16":  # the router of dots1 is F32 in files of transformers
                        self.assertTrue(key.endswith((".mlp.gate.weight", ".router.gate.weight")), key)
                    else:  # the bias of the choice of experts is F32 in published checkpoints
                        self.assertEqual((dtype, before[key][0]), ("F32", "BF16"))
                        halves = zip(*[iter(data)] * 4)
                        self.assertEqual(b"".join(bytes(part[2:]) for part in halves), before[key][2])

    def test_ranks(self):
        for name in ("mixtral", "glm4_moe", "phi3", "gpt_oss", "olmo3"):
            with self.subTest(name=name):
                prompt, expected = golden(name)
                file = self.convert(FAMILIES / name, f"{name}.gguf")
                self.assertEqual(self.ids(file, prompt, ranks=3 if name == "phi3" else 2), expected)

    def test_joined_latent_maps(self):
        """Older files of DeepSeek hold the maps of keys and values in one tensor, and the sizes of heads that these maps make."""
        prompt, expected = golden("deepseek_v2")
        file = Gguf(self.convert(FAMILIES / "deepseek_v2", "made.gguf"))
        heads, nope, rope, rank, values = 8, 12, 8, 48, 20
        for layer in range(3):
            (kind, key_shape, keys), (_, value_shape, of_values) = (file.tensors.pop(f"blk.{layer}.attn_{part}_b.weight") for part in "kv")
            self.assertEqual((kind, key_shape, value_shape), (BF16, [heads, rank, nope], [heads, values, rank]))
            rows = []
            for head in range(heads):
                for row in range(nope):
                    rows += [keys[2 * ((head * rank + column) * nope + row):][:2] for column in range(rank)]
                rows.append(of_values[2 * head * values * rank:][:2 * values * rank])
            file.tensors[f"blk.{layer}.attn_kv_b.weight"] = kind, [heads * (nope + values), rank], b"".join(rows)
        for part in ("key", "value"):
            del file.values[f"deepseek2.attention.{part}_length_mla"]
        for key, item in (("head_count_kv", heads), ("key_length", nope + rope), ("value_length", values)):
            file.set(f"deepseek2.attention.{key}", item)
        older = file.write(self.folder / "older.gguf")
        self.assertEqual(self.ids(older, prompt), expected)
        self.assertEqual(self.ids(self.convert(older, "back"), prompt), expected)
        cases = [("attention.kv_lora_rank", 47, "attention.kv_lora_rank: expected an even number, found 47"),
                 ("attention.kv_lora_rank", 65537, "attention.kv_lora_rank: expected a whole number from 1 to 65536, found 65537"),
                 ("rope.dimension_count", 0, "rope.dimension_count: expected a whole number from 2 to 65536, found 0"),
                 ("attention.key_length_mla", 8, "attention.key_length_mla: expected more than rope.dimension_count (8), found 8"),
                 ("attention.key_length", 55, "attention.key_length: expected 56 by attention.kv_lora_rank, found 55"),
                 ("attention.value_length_mla", 21, "tensor 'blk.0.attn_v_b.weight': expected shape [8, 21, 48], found [8, 20, 48]")]
        for key, item, message in cases:
            with self.subTest(key=key, item=item):
                file = Gguf(self.folder / "made.gguf")
                file.set(f"deepseek2.{key}", item)
                self.fail_with(kvzap("-m", file.write(self.folder / "spoilt.gguf"), "--token-ids", "-p", "1"), message)

    def test_malformed_heads(self):
        """Layers with windows have other heads than full ones."""
        flags, heads, kv_heads = "attention.sliding_window_pattern", "attention.head_count", "attention.head_count_kv"
        cases = [
            ("mimo_v2_flash", kv_heads, [4, 8, 8, 2], f"{kv_heads}: expected the same number above 0 in all layers without a window, found 2"),
            ("mimo_v2_flash", kv_heads, [4, 4, 4, 4], f"{kv_heads}: expected 8 in layers with a window, found 4"),
            ("mimo_v2_flash", kv_heads, [4, 8, 0, 4], f"{kv_heads}: expected the same number above 0 in all layers with a window, found 0"),
            ("mimo_v2_flash", heads, [8, 16, 16, 8], f"{heads}: expected 8 in layers with a window, found 16"),
            ("mimo_v2_flash", flags, [0, 1, 2, 0], f"{flags}[2]: expected a whole number from 0 to 1, found 2"),
            ("mimo_v2_flash", flags, None, f"{flags}: expected a flag for each layer, found none"),
            ("mimo_v2_flash", "attention.value_length", 26, "attention.value_length: expected an even number up to 24"),
            ("step3p7", heads, [4, 5, 4, 5, 4], "num_sliding_attention_heads"),
            ("step3p7", "attention.sliding_window", 0, "attention.sliding_window: expected a number of tokens above 0, found none"),
            ("step3p7", "swiglu_clamp_exp", [1, 2], "swiglu_clamp_exp: expected an array of 5 values of type f32"),
        ]
        made = {name: self.convert(self.folder_of(name), f"{name}.gguf") for name in ("mimo_v2_flash", "step3p7")}
        for name, key, item, message in cases:
            with self.subTest(name=name, key=key, item=item):
                file, whole = Gguf(made[name]), f"{ARCHITECTURES[name]}.{key}"
                if item is None:
                    del file.values[whole]
                elif isinstance(item, list):
                    file.values[whole] = struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)
                else:
                    file.set(whole, item)
                self.fail_with(kvzap("-m", file.write(self.folder / "spoilt.gguf"), "--token-ids", "-p", "1"), message)
        # Files of MiMo-V2 have numbers instead of flags, and blocks that predict further tokens.
        file, prompt = Gguf(made["mimo_v2_flash"]), golden("mimo_v2_flash")[0]
        for key, item in ((flags, [0, 1, 1, 0, 1]), (heads, [8] * 5), (kv_heads, [4, 8, 8, 4, 8])):
            file.values[f"mimo2.{key}"] = struct.pack("<IIQ5i", 9, 5, 5, *item)
        file.set("mimo2.block_count", 5)
        file.set("mimo2.nextn_predict_layers", 1)
        file.tensors.update({name.replace(".2.", ".4.", 1): item for name, item in file.tensors.items() if name.startswith("blk.2.")})
        self.assertEqual(self.ids(file.write(self.folder / "more.gguf"), prompt), self.ids(made["mimo_v2_flash"], prompt))

    @unittest.skipUnless(gguf, "needs the Python package gguf")
    def test_package_gguf(self):
        """The package reads each file. The names of tensors are those of its own list for the architecture."""
        for name, architecture in ARCHITECTURES.items():
            with self.subTest(name=name):
                folder = self.folder_of(name)
                config = json.loads((folder / "config.json").read_text())
                file = self.convert(folder, f"{name}.gguf")
                reader = gguf.GGUFReader(file)
                kind = next((key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture), None)
                if kind is None:  # a package older than the architecture
                    continue
                if name == "dbrx":
                    experts = config["ffn_config"]
                    config.update(num_hidden_layers=config["n_layers"], hidden_size=config["d_model"], num_experts=experts["moe_num_experts"],
                                  num_experts_per_tok=experts["moe_top_k"], intermediate_size=experts["ffn_hidden_size"])
                layers = config.get("num_hidden_layers", config.get("n_layer")) or len(config["layers_block_type"])
                known = {gguf.TENSOR_NAMES[tensor].format(bid=layer) for tensor in gguf.MODEL_TENSORS[kind] for layer in range(layers)}
                if name in ("qwen2_moe", "qwen3_moe"):  # these have a dense layer, unlike published models
                    dense = {"qwen2_moe": (0, 2), "qwen3_moe": (1,)}[name]
                    known.update(f"blk.{layer}.ffn_{part}" for layer in dense for part in ("gate", "up", "down"))
                known.update(tensor.format(layer) for layer in range(layers) for tensor in UNLISTED.get(architecture, ()))
                for tensor in reader.tensors:
                    self.assertIn(tensor.name.removesuffix(".weight").removesuffix(".bias").removesuffix(".scale"), known)
                shapes = {tensor.name: [int(extent) for extent in reversed(tensor.shape)] for tensor in reader.tensors}
                up = next((key for key in shapes if key.endswith("ffn_up_exps.weight")), None)
                experts = up and next((config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts") if key in config), None)
                if experts:
                    width = config.get("moe_intermediate_size", config.get("intermediate_size"))
                    self.assertEqual(shapes[up], [experts, width, config["hidden_size"]])
                values = {key: field.contents() for key, field in reader.fields.items() if key.startswith(architecture + ".")}
                self.assertEqual(values[f"{architecture}.block_count"], layers)
                self.assertEqual(values.get(f"{architecture}.expert_count"), experts)
                self.assertEqual(values.get(f"{architecture}.expert_used_count"), experts and next(config[key] for key in ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts") if key in config))
                field = next((key for key in ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_epsilon") if key in config), None)
                norm = "norm_rms" if field == "rms_norm_eps" or name.startswith("lfm2") else "norm"
                self.assertAlmostEqual(values[f"{architecture}.attention.layer_{norm}_epsilon"], config.get(field, 1e-5))
                if architecture in ("cohere2", "gemma2", "gemma3", "gpt-oss", "olmo2"):
                    self.assertEqual(values.get(f"{architecture}.attention.sliding_window"), config.get("sliding_window"))

    def test_blocks_of_experts(self):
        """Quantised experts: the same in a file, in a file made of a file, and quantised while they are loaded."""
        folder, heads, hidden, width, experts = self.folder / "made", 4, 64, 32, 4
        folder.mkdir()
        config = {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": hidden, "head_dim": 16,
            "intermediate_size": 64, "moe_intermediate_size": width, "num_hidden_layers": 2, "num_attention_heads": heads,
            "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 256, "num_experts": experts,
            "num_experts_per_tok": 2, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        }
        (folder / "config.json").write_text(json.dumps(config))
        shapes = {"model.embed_tokens": [96, hidden], "lm_head": [96, hidden], "model.norm": [hidden]}
        for layer in range(2):
            prefix = f"model.layers.{layer}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[prefix + norm] = [hidden]
            for norm in "qk":
                shapes[f"{prefix}self_attn.{norm}_norm"] = [16]
            for part, rows in (("q", 64), ("k", 32), ("v", 32)):
                shapes[f"{prefix}self_attn.{part}_proj"] = [rows, hidden]
            shapes[prefix + "self_attn.o_proj"] = [hidden, 64]
            shapes[prefix + "mlp.gate"] = [experts, hidden]
            for expert in range(experts):
                for part in ("gate_proj", "up_proj"):
                    shapes[f"{prefix}mlp.experts.{expert}.{part}"] = [width, hidden]
                shapes[f"{prefix}mlp.experts.{expert}.down_proj"] = [hidden, width]
        write_safetensors(folder / "model.safetensors", {
            f"{name}.weight": ("BF16", shape, random_values(shape[0] * (shape[1] if len(shape) > 1 else 1), 0.2, name))
            for name, shape in shapes.items()})
        plain, prompt = self.convert(folder, "made.gguf"), list(range(40))
        for kind, weights, block in (("Q8_0", "q8", "Q8_0"), ("Q4_K_M", "q4", "Q5_0")):
            with self.subTest(kind=kind):
                files = [self.folder / f"{kind}-{index}.gguf" for index in range(2)]
                for model, file in zip((folder, plain), files):
                    report = json.loads(self.command("quantize", "-m", model, "-o", file, "--type", kind, "-q", "--json", "-").text)
                    types = {tensor["name"]: tensor["type"] for tensor in report["tensors"]}
                    self.assertEqual(types["blk.1.ffn_gate_exps.weight"], block)
                    self.assertEqual(types["blk.1.ffn_gate_inp.weight"], "F32")
                expected = self.check_quantised_at_load(folder, [*files, plain], prompt, weights)
                # Each rank rounds its own inputs of a map to bytes.
                self.assert_near(self.logits(files[0], prompt, ranks=2), expected, 0.05)
                back = self.convert(files[0], f"{kind}-back")  # in bf16
                self.assert_near(self.logits(back, prompt), self.logits(files[0], prompt, "--weights", "unpacked"), 0.05)

    def test_older_files_of_mixtral(self):
        """They have a tensor for each expert."""
        prompt, expected = golden("mixtral")
        file = Gguf(self.convert(FAMILIES / "mixtral", "mixtral.gguf"))
        for name in [name for name in file.tensors if "_exps." in name]:
            kind, (count, *shape), data = file.tensors.pop(name)
            size = len(data) // count
            for expert in range(count):
                file.tensors[name.replace("_exps.", f".{expert}.")] = kind, shape, data[expert * size:][:size]
        older = file.write(self.folder / "older.gguf")
        self.assertEqual(self.ids(older, prompt), expected)
        self.assertEqual(self.ids(self.convert(older, "back"), prompt), expected)
        del file.tensors["blk.2.ffn_up.7.weight"]
        self.fail_with(kvzap("-m", file.write(self.folder / "cut.gguf"), "--token-ids", "-p", "1"),
                       "cut.gguf: tensor 'blk.2.ffn_up_exps.weight' of shape [8, 24, 48] is missing")

    def test_layers_for_prediction(self):
        """Published files of GLM-4.5 have one more block, for the prediction of further tokens. It is no layer."""
        prompt, expected = golden("glm4_moe")
        file = Gguf(self.convert(FAMILIES / "glm4_moe", "glm.gguf"))
        file.set("glm4moe.block_count", 4)
        file.set("glm4moe.nextn_predict_layers", 1)
        for name in [name for name in file.tensors if name.startswith("blk.2.")]:
            file.tensors[name.replace(".2.", ".3.", 1)] = file.tensors[name]
        file.tensors["blk.3.nextn.eh_proj.weight"] = F32, [48, 96], bytes(4 * 48 * 96)
        self.assertEqual(self.ids(file.write(self.folder / "more.gguf"), prompt), expected)
        self.assertEqual(self.ids(self.convert(self.folder / "more.gguf", "back"), prompt), expected)

    def test_malformed_experts(self):
        made = Gguf(self.convert(FAMILIES / "glm4_moe", "glm.gguf"))
        up, bias = "blk.1.ffn_up_exps.weight", "blk.1.exp_probs_b.bias"
        kind, (count, rows, columns), data = made.tensors[up]
        cases = [
            ("expert_count", 6, None, None, "tensor 'blk.1.ffn_gate_inp.weight': expected shape [6, 48], found [8, 48]"),
            (None, None, up, None, f"tensor '{up}' of shape [8, 24, 48] is missing"),
            (None, None, bias, None, f"tensor '{bias}' of shape [8] is missing"),
            (None, None, up, (kind, [count, columns, rows], data), f"tensor '{up}': expected shape [8, 24, 48], found [8, 48, 24]"),
            (None, None, up, (kind, [count - 1, rows, columns], data[:-2 * rows * columns]),
             f"tensor '{up}': expected shape [8, 24, 48], found [7, 24, 48]"),
            (None, None, up, (kind, [count * rows, columns], data), f"tensor '{up}': expected shape [8, 24, 48], found [192, 48]"),
            (None, None, "blk.1.ffn_gate_up_exps.weight", (kind, [1, 1, 32], data[:64]), "expected no such tensor"),
            ("expert_feed_forward_length", 25, None, None, "tensor 'blk.1.ffn_gate_exps.weight': expected shape [8, 25, 48]"),
            ("leading_dense_block_count", 2, None, None, "tensor 'blk.1.ffn_gate.weight' of shape [56, 48] is missing"),
            ("expert_used_count", 9, None, None, "expert_used_count: expected a whole number from 1 to 8, found 9"),
        ]
        for key, item, name, tensor, message in cases:
            with self.subTest(message=message):
                file = Gguf(self.folder / "glm.gguf")
                if key:
                    file.set(f"glm4moe.{key}", item)
                if name and tensor:
                    file.tensors[name] = tensor
                elif name:
                    del file.tensors[name]
                spoilt = file.write(self.folder / "spoilt.gguf")
                self.fail_with(kvzap("-m", spoilt, "--token-ids", "-p", "1"), message)
                self.fail_with(run_command([KVZAP, "convert", "-m", spoilt, "-o", self.folder / "x"]), message)

    def test_patterns_of_windows(self):
        """Layers with a window follow the period of the file, or that of the architecture."""
        prompt, _ = golden("gemma3_text")
        folder = self.folder_of("gemma3_text")
        file = Gguf(self.convert(folder, "gemma.gguf"))
        key = "gemma3.attention.sliding_window_pattern"
        self.assertEqual(file.values[key], value(2))
        kinds = {True: "full_attention", False: "sliding_attention"}
        answers = set()
        for period, full in ((2, (1, 3)), (3, (2,)), (1, (0, 1, 2, 3)), (0, ()), (None, ())):
            with self.subTest(period=period):
                expected = self.copy(folder, f"period-{period}", layer_types=[kinds[layer in full] for layer in range(4)])
                if period is None:
                    del file.values[key]
                else:
                    file.set(key, period)
                written = file.write(self.folder / "period.gguf")
                answers.add(tuple(self.ids(written, prompt)))
                self.assertEqual(self.ids(written, prompt), self.ids(expected, prompt))
        self.assertGreater(len(answers), 2)
        # Files of OLMo 3 have a flag for each layer.
        prompt, expected = golden("olmo3")
        file = Gguf(self.convert(FAMILIES / "olmo3", "olmo3.gguf"))
        for flags, is_equal in ((b"\1\0\1\0", True), (b"\0\1\0\1", False)):
            file.values["olmo2.attention.sliding_window_pattern"] = struct.pack("<IIQ", 9, 7, 4) + flags
            self.assertEqual(self.ids(file.write(self.folder / "flags.gguf"), prompt) == expected, is_equal)

    def test_malformed_windows(self):
        cases = [
            ("gpt_oss", "attention.sliding_window", 0, "attention.sliding_window: expected a number of tokens above 0, found none"),
            ("gpt_oss", "attention.sliding_window", 1, "sliding_window: expected at least 2 tokens"),
            ("gpt_oss", "attention.sliding_window_pattern", "two", "attention.sliding_window_pattern: expected a whole number"),
            ("gpt_oss", "rope.freq_base_swa", 1e4, "rope.freq_base_swa: expected 150000 as rope.freq_base, found 10000"),
            ("gpt_oss", "expert_gating_func", 2, "expert_gating_func: expected 3, as the architecture has no other, found 2"),
            ("gpt_oss", "expert_feed_forward_length", 25, "tensor 'blk.0.ffn_gate_exps.weight': expected shape [8, 25, 48], found [8, 24, 48]"),
            ("olmo3", "attention.sliding_window_pattern", b"\1\0\1", "attention.sliding_window_pattern: expected an array of 4 flags"),
            ("olmo3", "attention.sliding_window_pattern", b"\1\0\1\2", "attention.sliding_window_pattern[3]: expected 0 or 1"),
            ("cohere2", "logit_scale", 0.0, "logit_scale: expected a number above 0, found 0"),
            ("olmo3", "attention.sliding_window", -1, "attention.sliding_window: expected a whole number"),
        ]
        for index, (name, key, item, message) in enumerate(cases):
            with self.subTest(message=message):
                file = Gguf(self.convert(FAMILIES / name, f"{name}-{index}.gguf"))
                if isinstance(item, bytes):
                    found = struct.pack("<IIQ", 9, 7, len(item)) + item
                else:
                    found = struct.pack("<Ii", 5, item) if item == -1 else value(item)
                file.values[f"{ARCHITECTURES[name]}.{key}"] = found
                self.fail_with(kvzap("-m", file.write(self.folder / "spoilt.gguf"), "--token-ids", "-p", "1"), message)
        made = self.convert(FAMILIES / "gpt_oss", "gpt-oss.gguf")
        bias, sinks = "blk.1.ffn_up_exps.bias", "blk.1.attn_sinks.weight"
        for name, tensor, message in (
                (bias, None, f"tensor '{bias}' of shape [8, 24] is missing"),
                (bias, (F32, [8, 23], bytes(8 * 23 * 4)), f"tensor '{bias}': expected shape [8, 24], found [8, 23]"),
                (bias, (F32, [192], bytes(192 * 4)), f"tensor '{bias}': expected shape [8, 24], found [192]"),
                (sinks, None, f"tensor '{sinks}' of shape [8] is missing"),
                ("blk.1.ffn_norm.weight", (F32, [48], bytes(192)), "expected no such tensor")):
            with self.subTest(message=message):
                file = Gguf(made)
                file.tensors.pop(name, None)
                if tensor:
                    file.tensors[name] = tensor
                self.fail_with(kvzap("-m", file.write(self.folder / "spoilt.gguf"), "--token-ids", "-p", "1"), message)

    def test_quantised_experts_with_biases(self):
        """gpt-oss: blocks of experts whose checkpoints hold gate and up in one tensor."""
        hidden, width, experts, heads = 64, 32, 4, 4
        source = FAMILIES / "gpt_oss"
        config = json.loads((source / "config.json").read_text())
        config.update(hidden_size=hidden, intermediate_size=width, num_local_experts=experts, num_attention_heads=heads,
                      num_key_value_heads=2, vocab_size=96)
        folder = self.folder / "made"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        shapes = {"model.embed_tokens.weight": [96, hidden], "lm_head.weight": [96, hidden], "model.norm.weight": [hidden]}
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                shapes[f"{prefix}{norm}.weight"] = [hidden]
            for part, rows, columns in (("q", 64, hidden), ("k", 32, hidden), ("v", 32, hidden), ("o", hidden, 64)):
                shapes[f"{prefix}self_attn.{part}_proj.weight"], shapes[f"{prefix}self_attn.{part}_proj.bias"] = [rows, columns], [rows]
            shapes[f"{prefix}self_attn.sinks"] = [heads]
            shapes[f"{prefix}mlp.router.weight"], shapes[f"{prefix}mlp.router.bias"] = [experts, hidden], [experts]
            block = f"{prefix}mlp.experts."
            shapes[f"{block}gate_up_proj"], shapes[f"{block}gate_up_proj_bias"] = [experts, hidden, 2 * width], [experts, 2 * width]
            shapes[f"{block}down_proj"], shapes[f"{block}down_proj_bias"] = [experts, width, hidden], [experts, hidden]
        write_safetensors(folder / "model.safetensors", {
            name: ("BF16", shape, random_values(math.prod(shape), 0.2, name)) for name, shape in shapes.items()})
        plain, prompt = self.convert(folder, "made.gguf"), list(range(40))
        self.assertEqual(self.ids(plain, prompt), self.ids(folder, prompt))
        files = [self.folder / f"{index}.gguf" for index in range(2)]
        for model, file in zip((folder, plain), files):
            report = json.loads(self.command("quantize", "-m", model, "-o", file, "--type", "Q8_0", "-q", "--json", "-").text)
            types = {tensor["name"]: tensor["type"] for tensor in report["tensors"]}
            self.assertEqual([types[f"blk.1.ffn_{part}"] for part in ("gate_exps.weight", "up_exps.bias", "gate_inp.weight")],
                             ["Q8_0", "F32", "F32"])
        self.check_quantised_at_load(folder, [*files, plain], prompt, "q8")
        back, unpacked = self.convert(files[0], "back"), self.logits(files[0], prompt, "--weights", "unpacked")
        self.assert_near(self.logits(back, prompt), unpacked, 0.05)  # the folder is in bf16
        self.assert_near(self.logits(files[0], prompt, "--weights", "unpacked", ranks=2), unpacked, 1e-4)
        # Published files hold MXFP4 blocks.
        blocks, values = Gguf(plain), Gguf(plain)
        for name in [name for name in values.tensors if name.endswith("_exps.weight")]:
            _, shape, _ = values.tensors[name]
            made = mxfp4_blocks(math.prod(shape) // 32, name)
            blocks.tensors[name] = MXFP4, shape, b"".join(made)
            values.tensors[name] = F32, shape, b"".join(map(mxfp4_values, made))
        files = [file.write(self.folder / f"mxfp4-{index}.gguf") for index, file in enumerate((blocks, values))]
        expected = self.ids(files[1], prompt)
        self.assertEqual(self.ids(files[0], prompt, "--weights", "unpacked"), expected)
        self.assertEqual(self.ids(self.convert(files[0], "mxfp4-back"), prompt), expected)
        self.assertEqual(len(self.ids(files[0], prompt)), len(expected))
        # Such values are rounded to themselves.
        made = self.command("quantize", "-m", files[1], "-o", self.folder / "mxfp4-made.gguf", "--type", "MXFP4_MOE", "-q",
                            "--json", "-")
        experts = [tensor for tensor in json.loads(made.text)["tensors"] if tensor["name"].endswith("_exps.weight")]
        self.assertEqual({(tensor["type"], tensor["relative_error"]) for tensor in experts}, {("MXFP4", 0)})

    def test_quantised_states(self):
        """Files of state spaces and short convolutions in Q8_0: their values, and the folder made of them."""
        for name, quantised in (("lfm2", "shortconv.in_proj"), ("granitemoehybrid_dense", "ssm_in"), ("falcon_h1", "ssm_in")):
            with self.subTest(name=name):
                file, prompt = self.folder / f"{name}-q8.gguf", golden(name)[0]
                report = json.loads(self.command("quantize", "-m", self.folder_of(name), "-o", file, "--type", "Q8_0", "-q",
                                                 "--json", "-").text)
                types = {tensor["name"]: tensor["type"] for tensor in report["tensors"]}
                layer = 1 if name == "granitemoehybrid_dense" else 0
                self.assertEqual(types[f"blk.{layer}.{quantised}.weight"], "Q8_0")
                self.assertEqual({kind for key, kind in types.items() if "conv1d" in key or "shortconv.conv" in key}, {"F32"})
                unpacked = self.logits(file, prompt, "--weights", "unpacked")
                self.assert_near(self.logits(file, prompt), unpacked, 0.1)
                self.assert_near(self.logits(self.convert(file, f"{name}-q8-back"), prompt), unpacked, 0.1)

    def test_settings_that_the_format_lacks(self):
        cases = [
            ("smollm3", {}, "no_rope_layers[1]: expected 1, which smollm3 in GGUF implies, found 0"),
            ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob: expected true, which qwen3moe in GGUF implies, found false"),
            ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob: expected false, which qwen2moe in GGUF implies, found true"),
            ("gemma3_text", {}, "query_pre_attn_scalar: expected 16, which gemma3 in GGUF implies, found 20"),
            ("gemma2", {"query_pre_attn_scalar": 16, "final_logit_softcapping": None},
             "final_logit_softcapping: expected a number above 0, which gemma2 in GGUF implies, found none"),
            ("gemma2", {"query_pre_attn_scalar": 16, "sliding_window": None, "layer_types": ["full_attention"] * 4},
             "sliding_window: expected a window in some layers, which gemma2 in GGUF implies, found none"),
            ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit: expected 7, which gpt-oss in GGUF implies, found 5"),
            ("olmo3", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1000.0},
                                           "sliding_attention": {"rope_type": "default", "rope_theta": 200.0}}},
             "rope_parameters.sliding_attention.rope_theta: expected that of full_attention"),
            ("olmo3", {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
             "layer_types[2]: expected sliding_attention, as GGUF needs one full layer in 2, found full_attention"),
            ("cohere2", {"layer_types": ["full_attention", "sliding_attention"] * 2},
             "layer_types[1]: expected full_attention, as GGUF needs one full layer in 1, found sliding_attention"),
            ("llama4_text", {}, "attn_scale: expected 0.1, which llama4 in GGUF implies, found 0.3"),
            ("llama4_text", {"attn_scale": 0.1}, "floor_scale: expected 8192, which llama4 in GGUF implies, found 16"),
            ("llama4_text", {**FIXED["llama4_text"], "attention_chunk_size": 28},
             "attention_chunk_size: expected 8192, which llama4 in GGUF implies, found 28"),
            ("llama4_text", {**FIXED["llama4_text"], "use_qk_norm": False},
             "use_qk_norm: expected true for 8 experts, which llama4 in GGUF implies, found false"),
            ("granite", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "RoPE scaling: expected linear"),
        ]
        for index, (name, changes, message) in enumerate(cases):
            with self.subTest(name=name, index=index):
                folder = self.copy(FAMILIES / name, f"{index}/{name}", **changes)
                self.fail_with(run_command([KVZAP, "convert", "-m", folder, "-o", self.folder / "x.gguf"]), f"{name}/config.json: {message}")
                self.assertFalse((self.folder / "x.gguf").exists())


if __name__ == "__main__":
    unittest.main()
