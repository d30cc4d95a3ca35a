"""GGUF files of models with gated delta nets, in the form that llama.cpp's conversion gives them."""
import json
import math
import random
import struct
import unittest

from harness import KVZAP, TestCase, kvzap, read_safetensors, run_command, write_safetensors
from test_gguf import BF16, F32, value
from test_gguf_families import FAMILIES, Gguf, bf16_values, gguf

PROMPT = list(range(3, 60, 2))
HEADS = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
# The folders, their architectures in GGUF, and the fields that the format needs: heads of one size.
MODELS = {
    "qwen3_next": ("qwen3next", {**HEADS}),
    "qwen3_5_text": ("qwen35", {**HEADS, "layer_types": ["linear_attention", "full_attention"] * 2}),
    "qwen3_5_moe_text": ("qwen35moe", {**HEADS, "linear_num_value_heads": 6,
                                       "layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"]}),
}
DELTA_NAMES = {
    "in_proj_qkv.weight": "attn_qkv.weight", "in_proj_z.weight": "attn_gate.weight", "in_proj_a.weight": "ssm_alpha.weight",
    "in_proj_b.weight": "ssm_beta.weight", "in_proj_ba.weight": "ssm_ba.weight", "conv1d.weight": "ssm_conv1d.weight",
    "norm.weight": "ssm_norm.weight", "out_proj.weight": "ssm_out.weight", "A_log": "ssm_a", "dt_bias": "ssm_dt.bias",
}


def layer_types(config):
    if "layer_types" in config:
        return config["layer_types"]
    interval = config["full_attention_interval"]
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(config["num_hidden_layers"])]


def shapes_of(name, config):
    hidden, dim, vocabulary = (config[key] for key in ("hidden_size", "head_dim", "vocab_size"))
    keys, values, key_dim, value_dim, kernel = (
        config[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"))
    inputs, outputs = 2 * keys * key_dim, values * value_dim
    shapes = {"model.embed_tokens.weight": [vocabulary, hidden], "lm_head.weight": [vocabulary, hidden], "model.norm.weight": [hidden]}
    for layer, kind in enumerate(layer_types(config)):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = [hidden]
        if kind == "full_attention":
            rows = {"q": 2 * config["num_attention_heads"] * dim, "k": config["num_key_value_heads"] * dim}
            for part in "qkv":
                shapes[f"{prefix}self_attn.{part}_proj.weight"] = [rows.get(part, rows["k"]), hidden]
            shapes[f"{prefix}self_attn.o_proj.weight"] = [hidden, rows["q"] // 2]
            for part in "qk":
                shapes[f"{prefix}self_attn.{part}_norm.weight"] = [dim]
        else:
            net = {"conv1d.weight": [inputs + outputs, 1, kernel], "A_log": [values], "dt_bias": [values], "norm.weight": [value_dim],
                   "out_proj.weight": [hidden, outputs]}
            if name == "qwen3_next":
                net.update({"in_proj_qkvz.weight": [inputs + 2 * outputs, hidden], "in_proj_ba.weight": [2 * values, hidden]})
            else:
                net.update({"in_proj_qkv.weight": [inputs + outputs, hidden], "in_proj_z.weight": [outputs, hidden],
                            "in_proj_a.weight": [values, hidden], "in_proj_b.weight": [values, hidden]})
            shapes.update({f"{prefix}linear_attn.{part}": shape for part, shape in net.items()})
        widths = {"": config.get("intermediate_size")}
        if "num_experts" in config:
            widths = {f"experts.{index}.": config["moe_intermediate_size"] for index in range(config["num_experts"])}
            widths["shared_expert."] = config["shared_expert_intermediate_size"]
            shapes[f"{prefix}mlp.gate.weight"] = [config["num_experts"], hidden]
            shapes[f"{prefix}mlp.shared_expert_gate.weight"] = [1, hidden]
        for part, width in widths.items():
            for row in ("gate", "up"):
                shapes[f"{prefix}mlp.{part}{row}_proj.weight"] = [width, hidden]
            shapes[f"{prefix}mlp.{part}down_proj.weight"] = [hidden, width]
    return shapes


def random_tensor(name, shape):
    source = random.Random(name)
    mean, scale = (1, 0.2) if name.endswith("linear_attn.norm.weight") else (0, 0.3)
    if name.endswith("A_log"):
        scale = 1
    return "BF16", shape, b"".join(struct.pack("<f", source.gauss(mean, scale))[2:] for _ in range(math.prod(shape)))


def widened(data):
    """BF16 values as F32."""
    return b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))


def floats(tensor):
    kind, _, data = tensor
    return bf16_values(data) if kind == BF16 else list(struct.unpack(f"<{len(data) // 4}f", data))


def dealt(rows, keys, group, size):
    """Rows of value heads, `size` of each: the first head of each key head, then the second one of each, and so on."""
    return [row for part in range(group) for key in range(keys) for row in rows[(key * group + part) * size:][:size]]


def published_form(name, config, tensors):
    """The tensors of delta nets as llama.cpp's conversion writes them: {name: (shape, values)}."""
    keys, values, key_dim, value_dim = (
        config[f"linear_{key}"] for key in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
    group, deals = values // keys, name != "qwen3_next"
    result = {}
    for key, (_, shape, data) in tensors.items():
        prefix, block, part = key.partition("linear_attn.")
        if not block:
            continue
        place = f"blk.{prefix.split('.')[2]}."
        numbers, columns = bf16_values(data), shape[-1] if len(shape) > 1 else 1
        rows = [numbers[i:i + columns] for i in range(0, len(numbers), columns)]
        if part == "in_proj_qkvz.weight":
            sizes = [key_dim, key_dim, group * value_dim, group * value_dim]
            pieces = [[row for head in range(keys) for row in rows[head * sum(sizes) + sum(sizes[:index]):][:size]]
                      for index, size in enumerate(sizes)]
            queries, gates = pieces[0] + pieces[1] + pieces[2], pieces[3]
            result[f"{place}attn_qkv.weight"] = [len(queries), columns], sum(queries, [])
            result[f"{place}attn_gate.weight"] = [len(gates), columns], sum(gates, [])
            continue
        first = 2 * keys * key_dim if part in ("in_proj_qkv.weight", "conv1d.weight") else 0
        size = value_dim if first or part in ("in_proj_z.weight", "out_proj.weight") else 1
        if deals and part == "out_proj.weight":
            rows = [dealt(row, keys, group, size) for row in rows]
        elif deals and part != "norm.weight":
            rows = rows[:first] + dealt(rows[first:], keys, group, size)
        if part == "A_log":
            rows = [[-math.exp(row[0])] for row in rows]
        result[place + DELTA_NAMES[part]] = [extent for extent in shape if extent > 1], sum(rows, [])
    return result


class Hybrids(TestCase):
    def convert(self, model, name):
        output = self.folder / name
        done = run_command([KVZAP, "convert", "-m", model, "-o", output])
        self.assertEqual(done.code, 0, done)
        return output

    def ids(self, model, *flags, ranks=0):
        done = self.succeed("-m", model, "--token-ids", "-p", " ".join(map(str, PROMPT[:-1])), "--question", PROMPT[-1], "-n", 24,
                            "--greedy-plain", "--ignore-eos", "--dtype", "f32", "-q", *flags, ranks=ranks)
        return list(map(int, done.text.split()))

    def make(self, name, into=None, **changes):
        """A folder with random weights."""
        folder = self.folder / (into or name)
        folder.mkdir()
        config = {**json.loads((FAMILIES / name / "config.json").read_text()), **MODELS[name][1], **changes}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {key: random_tensor(key, shape) for key, shape in shapes_of(name, config).items()}
        write_safetensors(folder / "model.safetensors", tensors)
        return folder, config, tensors

    def test_conversion(self):
        """A folder, its file and the folder of that give the same ids. The file has the published form of tensors."""
        for name, (architecture, _) in MODELS.items():
            with self.subTest(name=name):
                folder, config, tensors = self.make(name)
                expected = self.ids(folder)
                self.assertGreater(len(set(expected)), 4)
                path = self.convert(folder, f"{name}.gguf")
                file = Gguf(path)
                self.assertEqual(file.values["general.architecture"], value(architecture))
                for key, (shape, numbers) in published_form(name, config, tensors).items():
                    self.assertEqual(file.tensors[key][1], shape, key)
                    for found, stated in zip(floats(file.tensors[key]), numbers):
                        self.assertAlmostEqual(found, stated, delta=1e-6 * abs(stated), msg=key)
                weight = bf16_values(tensors["model.layers.0.input_layernorm.weight"][2])[0]
                self.assertAlmostEqual(floats(file.tensors["blk.0.attn_norm.weight"])[0], 1 + weight, delta=1e-6)
                self.assertEqual(file.tensors["blk.0.ssm_conv1d.weight"][0], F32)
                self.assertEqual(self.ids(path), expected)
                back = self.convert(path, f"{name}-back")
                self.assertEqual(self.ids(back), expected)
                self.assertEqual(self.ids(path, ranks=2), expected)
                after = read_safetensors(back / "model.safetensors")
                self.assertEqual(set(after), set(tensors))
                for key, (dtype, shape, data) in after.items():
                    self.assertEqual(shape, tensors[key][1], key)
                    if key.endswith("A_log"):
                        self.assertEqual(dtype, "F32")
                        for found, stated in zip(struct.unpack(f"<{shape[0]}f", data), bf16_values(tensors[key][2])):
                            self.assertAlmostEqual(found, stated, delta=1e-6)
                    elif "norm" in key and "linear_attn" not in key:  # the file holds 1 + weight as F32
                        for found, stated in zip(bf16_values(data), bf16_values(tensors[key][2])):
                            self.assertAlmostEqual(found, stated, delta=1e-7)
                    else:
                        self.assertEqual(data, tensors[key][2], key)

    def test_metadata(self):
        for name, (architecture, _) in MODELS.items():
            with self.subTest(name=name):
                folder, config, _ = self.make(name)
                file = Gguf(self.convert(folder, f"{name}.gguf"))
                heads = config["linear_num_value_heads"]
                expected = {"ssm.conv_kernel": config["linear_conv_kernel_dim"], "ssm.state_size": 16, "ssm.time_step_rank": heads,
                            "ssm.group_count": config["linear_num_key_heads"], "ssm.inner_size": 16 * heads,
                            "full_attention_interval": layer_types(config).index("full_attention") + 1,
                            "rope.dimension_count": config["head_dim"] // 4, "block_count": 4}
                if "num_experts" in config:
                    expected.update({"expert_count": 8, "expert_used_count": config["num_experts_per_tok"],
                                     "expert_feed_forward_length": config["moe_intermediate_size"],
                                     "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]})
                if name != "qwen3_next":
                    expected["rope.dimension_sections"] = config["rope_parameters"]["mrope_section"] + [0]
                for key, item in expected.items():
                    self.assertEqual(file.values[f"{architecture}.{key}"], value(item), key)
                self.assertNotIn(f"{architecture}.attention.recurrent_layers", file.values)

    @unittest.skipUnless(gguf, "needs the Python package gguf")
    def test_package_gguf(self):
        """The names of tensors are those of the package's list for the architecture."""
        for name, (architecture, _) in MODELS.items():
            with self.subTest(name=name):
                folder, config, _ = self.make(name)
                kind = next(key for key, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
                known = {gguf.TENSOR_NAMES[tensor].format(bid=layer) for tensor in gguf.MODEL_TENSORS[kind] for layer in range(4)}
                for tensor in gguf.GGUFReader(self.convert(folder, f"{name}.gguf")).tensors:
                    self.assertIn(tensor.name.removesuffix(".weight").removesuffix(".bias"), known)

    def test_layers(self):
        """Files have a flag for each layer, or the number of layers of which the last one has attention."""
        mixed = ["linear_attention", "full_attention", "full_attention", "linear_attention"]
        folder, _, _ = self.make("qwen3_5_text", layer_types=mixed)
        file, expected = Gguf(self.convert(folder, "mixed.gguf")), self.ids(folder)
        self.assertEqual(file.values["qwen35.attention.recurrent_layers"], struct.pack("<IIQ", 9, 7, 4) + b"\1\0\0\1")
        self.assertEqual(self.ids(self.folder / "mixed.gguf"), expected)
        del file.values["qwen35.attention.recurrent_layers"]
        self.fail_with(kvzap("-m", file.write(self.folder / "cut.gguf"), "--token-ids", "-p", "1"),
                       "cut.gguf: tensor 'blk.2.")
        folder, _, _ = self.make("qwen3_5_text", "four", layer_types=["linear_attention"] * 3 + ["full_attention"])
        file, expected = Gguf(self.convert(folder, "four.gguf")), self.ids(folder)
        del file.values["qwen35.full_attention_interval"]
        self.assertEqual(self.ids(file.write(self.folder / "absent.gguf")), expected)

    def test_factors_of_falcon_h1(self):
        """Files include the factors in the weights. Those of powers of two change no digit."""
        factors = {"embedding_multiplier": 4.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.5, "attention_out_multiplier": 2.0,
                   "ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.25, "mlp_multipliers": [2.0, 0.5],
                   "ssm_multipliers": [0.5, 2.0, 4.0, 1.0, 0.25], "mamba_norm_before_gate": False}
        for is_tied in (False, True):
            with self.subTest(is_tied=is_tied):
                folder = self.copy(FAMILIES / "falcon_h1", f"falcon-{is_tied}", **factors, tie_word_embeddings=is_tied)
                if is_tied:
                    tensors = read_safetensors(folder / "model.safetensors")
                    del tensors["lm_head.weight"]
                    write_safetensors(folder / "model.safetensors", tensors)
                expected, path = self.ids(folder), self.convert(folder, f"falcon-{is_tied}.gguf")
                file, tensors = Gguf(path), read_safetensors(folder / "model.safetensors")
                self.assertIn("output.weight", file.tensors)  # the factors of a tied table differ
                for key, tensor, factor in (("token_embd", "embed_tokens", 4), ("blk.1.attn_k", "layers.1.self_attn.k_proj", 0.5),
                                            ("blk.1.ffn_gate", "layers.1.feed_forward.gate_proj", 2),
                                            ("blk.1.ssm_in", "layers.1.mamba.in_proj", 1)):
                    found = floats(file.tensors[f"{key}.weight"])[0]
                    self.assertEqual(found, factor * bf16_values(tensors[f"model.{tensor}.weight"][2])[0], key)
                self.assertEqual(self.ids(path), expected)
                self.assertEqual(self.ids(path, ranks=2), expected)
                back = self.convert(path, f"falcon-{is_tied}-back")
                self.assertEqual(self.ids(back), expected)
                self.assertNotIn("embedding_multiplier", json.loads((back / "config.json").read_text()))

    def test_malformed_states(self):
        cases = [
            ("lfm2_moe", {"routed_scaling_factor": 1.0}, "lfm2moe", [
                ("shortconv.l_cache", 0, "shortconv.l_cache: expected a whole number from 1 to 16, found 0"),
                ("shortconv.l_cache", 1 << 31, "shortconv.l_cache: expected a whole number from 1 to 16, found 2147483648"),
                ("attention.sliding_window", 8, "attention.sliding_window: expected 0, as the architecture has no other, found 8"),
                ("attention.head_count_kv", [0, 0, 2, 1], "attention.head_count_kv: expected the same number for all layers, or 0, found 2 and 1"),
                ("attention.head_count_kv", [0, 0, 2], "attention.head_count_kv: expected an array of 4 whole numbers"),
                ("attention.head_count_kv", [0, 0, -2, 0], "attention.head_count_kv[2]: expected a whole number from 0"),
                ("attention.head_count_kv", [0, 2, 2, 0], "tensor 'blk.1.attn_q.weight' of shape [80, 80] is missing"),
                ("expert_gating_func", 1, "expert_gating_func: expected 2, as the architecture has no other, found 1")]),
            ("granitemoehybrid_dense", {}, "granitehybrid", [
                ("ssm.state_size", 0, "ssm.state_size: expected a whole number from 1 to 65536, found 0"),
                ("ssm.state_size", 1 << 17, "ssm.state_size: expected a whole number from 1 to 65536, found 131072"),
                ("ssm.time_step_rank", 3, "ssm.inner_size: expected a multiple of ssm.time_step_rank (3), found 128"),
                ("ssm.group_count", 3, "mamba_n_groups: expected a divisor of mamba_n_heads (4), found 3"),
                ("ssm.inner_size", 64, "mamba_n_heads: expected heads that have 128 channels together, found 4 of 16"),
                ("ssm.conv_kernel", 3, "tensor 'blk.1.ssm_conv1d.weight': expected shape [192, 3], found [192, 2]")]),
            ("jamba", {}, "jamba", [
                ("ssm.inner_size", 180, "ssm.inner_size: expected 120, as the architecture has no other, found 180"),
                ("ssm.time_step_rank", 6, "tensor 'blk.0.ssm_x.weight': expected shape [26, 120], found [25, 120]"),
                ("ssm.conv_kernel", 17, "ssm.conv_kernel: expected a whole number from 1 to 16, found 17"),
                ("attention.head_count_kv", [0, 3, 3, 0, 3],
                 "attention.head_count_kv: expected attn in layers at one distance, the first one below it, found layers 1, 2, 4"),
                ("attention.head_count_kv", [0, 0, 0, 0, 3], "tensor 'blk.1.ssm_x.weight' of shape [25, 120] is missing"),
                ("expert_used_count", 7, "expert_used_count: expected a whole number from 1 to 6, found 7")]),
        ]
        for name, changes, architecture, faults in cases:
            made = self.convert(self.copy(FAMILIES / name, name, **changes), f"{name}.gguf")
            for key, item, message in faults:
                with self.subTest(name=name, key=key, item=item):
                    file = Gguf(made)
                    if isinstance(item, list):
                        file.values[f"{architecture}.{key}"] = struct.pack(f"<IIQ{len(item)}i", 9, 5, len(item), *item)
                    elif item >= 1 << 31:
                        file.values[f"{architecture}.{key}"] = struct.pack("<II", 4, item)
                    else:
                        file.set(f"{architecture}.{key}", item)
                    self.fail_with(kvzap("-m", file.write(self.folder / "spoilt.gguf"), "--token-ids", "-p", "1"), message)

    def test_layers_for_prediction(self):
        for name in ("qwen3_5_text", "qwen3_5_moe_text"):
            with self.subTest(name=name):
                architecture = MODELS[name][0]
                folder, config, _ = self.make(name)
                expected, file = self.ids(folder), Gguf(self.convert(folder, f"{name}.gguf"))
                file.set(f"{architecture}.block_count", 5)
                file.set(f"{architecture}.nextn_predict_layers", 1)
                full = layer_types(config).index("full_attention")
                for key in [key for key in file.tensors if key.startswith(f"blk.{full}.")]:
                    file.tensors[key.replace(f".{full}.", ".4.", 1)] = file.tensors[key]
                hidden = config["hidden_size"]
                file.tensors["blk.4.nextn.eh_proj.weight"] = F32, [hidden, 2 * hidden], bytes(8 * hidden * hidden)
                self.assertEqual(self.ids(file.write(self.folder / f"{name}-more.gguf")), expected)

    def test_other_forms(self):
        """Older files of Qwen3-Next keep the rows of a checkpoint in ssm_in. Published files lack keys that kvzap writes."""
        folder, config, tensors = self.make("qwen3_next")
        expected, file = self.ids(folder), Gguf(self.convert(folder, "next.gguf"))
        for key, (_, shape, data) in tensors.items():
            if key.endswith("in_proj_qkvz.weight"):
                prefix = f"blk.{key.split('.')[2]}."
                del file.tensors[f"{prefix}attn_qkv.weight"], file.tensors[f"{prefix}attn_gate.weight"]
                file.tensors[f"{prefix}ssm_in.weight"] = BF16, shape, data
        self.assertEqual(self.ids(file.write(self.folder / "older.gguf")), expected)
        self.assertEqual(self.ids(self.convert(self.folder / "older.gguf", "older")), expected)
        folder, config, _ = self.make("qwen3_5_moe_text")
        expected, file = self.ids(folder), Gguf(self.convert(folder, "moe.gguf"))
        for key in ("feed_forward_length", "expert_gating_func"):
            del file.values[f"qwen35moe.{key}"]
        self.assertEqual(self.ids(file.write(self.folder / "published.gguf")), expected)
        # Files of F32 values, as the conversion of llama.cpp writes with --outtype f32.
        for key, (kind, shape, data) in file.tensors.items():
            file.tensors[key] = F32, shape, widened(data) if kind == BF16 else data
        self.assertEqual(self.ids(file.write(self.folder / "wide.gguf")), expected)

    def test_quantised(self):
        sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "hidden_size": 64}
        for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
            with self.subTest(name=name):
                more = {"intermediate_size": 64} if name != "qwen3_5_moe_text" else {}
                if name != "qwen3_5_text":
                    more.update(moe_intermediate_size=32, shared_expert_intermediate_size=32)
                folder, _, _ = self.make(name, **sizes, **more)
                plain = self.convert(folder, f"{name}.gguf")
                files = [self.folder / f"{name}-{index}.gguf" for index in range(2)]
                for model, file in zip((folder, plain), files):
                    done = run_command([KVZAP, "quantize", "-m", model, "-o", file, "--type", "Q8_0", "-q", "--json", "-"])
                    self.assertEqual(done.code, 0, done)
                    types = {tensor["name"]: tensor["type"] for tensor in json.loads(done.text)["tensors"]}
                    for part in ("attn_qkv.weight", "attn_gate.weight", "ssm_out.weight"):
                        self.assertEqual(types[f"blk.0.{part}"], "Q8_0", part)
                    for part in ("ssm_conv1d.weight", "ssm_a", "ssm_dt.bias", "ssm_norm.weight"):
                        self.assertEqual(types[f"blk.0.{part}"], "F32", part)
                self.assertEqual(files[0].read_bytes()[-4096:], files[1].read_bytes()[-4096:])
                unpacked = self.logits(files[0], PROMPT, "--weights", "unpacked")
                self.assert_near(self.logits(self.convert(files[0], f"{name}-back"), PROMPT), unpacked, 0.05)  # in bf16
                self.assert_near(self.logits(files[0], PROMPT, "--weights", "unpacked", ranks=2), unpacked, 1e-4)
                self.check_quantised_at_load(folder, files, PROMPT, "q8")

    def test_settings_that_the_format_lacks(self):
        cases = [
            ("qwen3_next", {"linear_value_head_dim": 10}, "linear_value_head_dim: expected 16 as linear_key_head_dim, which qwen3next"),
            ("qwen3_next", {"norm_topk_prob": False}, "norm_topk_prob: expected true, which qwen3next in GGUF implies, found false"),
            ("qwen3_next", {"mlp_only_layers": [1]},
             "mlp_only_layers: expected experts in layer 1, which qwen3next in GGUF implies, found none"),
            ("qwen3_5_text", {"attention_bias": True}, "attention_bias: expected false, which qwen35 in GGUF implies, found true"),
            ("qwen3_5_text", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
             "RoPE scaling: expected linear, llama3, or yarn with its usual attention factor, found dynamic"),
            ("qwen3_5_moe_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 1, 1],
                                                      "partial_rotary_factor": 0.25}},
             "rope_parameters.mrope_section: expected three almost equal numbers, which qwen35moe in GGUF implies, found 3, 1 and 1"),
        ]
        for index, (name, changes, message) in enumerate(cases):
            with self.subTest(message=message):
                folder = self.folder / str(index)
                folder.mkdir()
                config = {**json.loads((FAMILIES / name / "config.json").read_text()), **MODELS[name][1], **changes}
                (folder / "config.json").write_text(json.dumps(config))
                write_safetensors(folder / "model.safetensors", {
                    key: random_tensor(key, shape) for key, shape in shapes_of(name, config).items()})
                output = self.folder / "x.gguf"
                self.fail_with(run_command([KVZAP, "convert", "-m", folder, "-o", output]), f"{index}/config.json: {message}")
                self.assertFalse(output.exists())

    def test_malformed(self):
        folder, _, _ = self.make("qwen3_5_text")
        path = self.convert(folder, "made.gguf")
        cases = [
            ("ssm.inner_size", 100, "qwen35.ssm.inner_size: expected a multiple of ssm.time_step_rank (12), found 100"),
            ("ssm.group_count", 5, "linear_num_value_heads: expected a multiple of linear_num_key_heads (5), found 12"),
            ("ssm.state_size", 15, "tensor 'blk.0.attn_qkv.weight': expected shape [372, 48], found [384, 48]"),
            ("full_attention_interval", 0, "qwen35.full_attention_interval: expected"),
            ("rope.dimension_sections", [2, 1], "qwen35.rope.dimension_sections: expected"),
        ]
        for key, item, message in cases:
            with self.subTest(message=message):
                file = Gguf(path)
                file.set(f"qwen35.{key}", item)
                self.fail_with(kvzap("-m", file.write(self.folder / "spoilt.gguf"), "--token-ids", "-p", "1"), message)
        for name, message in (("blk.0.ssm_a", "tensor 'blk.0.ssm_a' of shape [12] is missing"),
                              ("blk.0.ssm_dt.bias", "tensor 'blk.0.ssm_dt.bias' of shape [12] is missing"),
                              ("blk.0.ssm_conv1d.weight", "tensor 'blk.0.ssm_conv1d.weight' of shape [384, 4] is missing")):
            with self.subTest(message=message):
                file = Gguf(path)
                del file.tensors[name]
                self.fail_with(kvzap("-m", file.write(self.folder / "spoilt.gguf"), "--token-ids", "-p", "1"), message)


if __name__ == "__main__":
    unittest.main()
