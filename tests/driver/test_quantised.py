"""Quantised checkpoints give the logits of their dequantised values, on one rank and on two."""
import functools
import json
import os
import unittest
import zlib

from harness import SOURCE, TestCase, kvzap, read_safetensors, write_safetensors

try:
    import numpy as np
except ImportError:
    np = None

MODEL = SOURCE / "tests/golden/models/llama-random"
GROUP = 64
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # outputs by nibble of a word


def weights():
    """The model's tensors as float32."""
    tensors = {}
    for file in sorted(MODEL.glob("*.safetensors")):
        for name, (_, shape, data) in read_safetensors(file).items():
            bits = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
            tensors[name] = bits.view(np.float32).reshape(shape)
    return tensors


def entry(dtype, values):
    return dtype, list(values.shape), np.ascontiguousarray(values).tobytes()


def packed(values, order=range(8)):
    """Words of the eight nibbles values[..., 8 * i + order[nibble]]."""
    nibbles = values.reshape(*values.shape[:-1], -1, 8)[..., list(order)].astype(np.uint32)
    return np.bitwise_or.reduce(nibbles << (4 * np.arange(8, dtype=np.uint32)), axis=-1)


def e4m3_values():
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    values = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    return np.where(bits & 128, -values, values).astype(np.float32)


def nearest(table, values):
    """Indices of the nearest values of `table`."""
    order = np.argsort(table, kind="stable")
    ascending = table[order]
    return order[np.searchsorted((ascending[1:] + ascending[:-1]) / 2, values)]


def fp8(name, matrix, block=(128, 128)):
    rows, columns = matrix.shape
    table = e4m3_values()
    table[[127, 255]] = 448, -448  # NaN is never chosen
    shape = tuple(-(-extent // size) for extent, size in zip(matrix.shape, block))
    scales = np.zeros(shape, np.float32)
    for i, j in np.ndindex(*shape):
        part = matrix[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        scales[i, j] = np.abs(part).max() / np.float32(300)
    wide = scales.repeat(block[0], 0)[:rows].repeat(block[1], 1)[:, :columns]
    bits = nearest(table, matrix / wide)
    bits = np.where(bits & 127 == 127, bits - 1, bits).astype(np.uint8)
    parts = {name: entry("F8_E4M3", bits), name + "_scale_inv": entry("F32", scales)}
    return parts, e4m3_values()[bits] * wide


def mxfp4(name, matrix):
    rows, columns = matrix.shape
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([table, -table])
    blocks = matrix.reshape(rows, columns // 32, 32)
    exponent = np.floor(np.log2(np.abs(blocks).max(-1))) - 2
    scale = (2.0**exponent).astype(np.float32)[..., None]
    bits = nearest(table, blocks / scale).astype(np.uint8)
    parts = {
        name + "_blocks": entry("U8", bits[..., 0::2] | bits[..., 1::2] << 4),
        name + "_scales": entry("U8", (exponent + 127).astype(np.uint8)),
    }
    return parts, (table[bits] * scale).reshape(rows, columns)


def integers(matrix, group_of):
    """Integers of 4 bits, zero points and scales of groups of inputs, all with inputs as rows."""
    by_input = matrix.T
    groups = [by_input[group_of == group] for group in range(group_of.max() + 1)]
    low = np.array([group.min(0) for group in groups])
    high = np.array([group.max(0) for group in groups])
    scales = ((high - low) / 15).astype(np.float16)
    wide = scales.astype(np.float32)
    zeros = np.clip(np.rint(-low / wide), 0, 15)
    quantised = np.clip(np.rint(by_input / wide[group_of]) + zeros[group_of], 0, 15)
    return quantised, zeros, scales, ((quantised - zeros[group_of]) * wide[group_of]).T


def awq(name, matrix):
    layer, group_of = name[: -len(".weight")], np.arange(matrix.shape[1]) // GROUP
    quantised, zeros, scales, values = integers(matrix, group_of)
    parts = {
        layer + ".qweight": entry("I32", packed(quantised, AWQ_ORDER)),
        layer + ".qzeros": entry("I32", packed(zeros, AWQ_ORDER)),
        layer + ".scales": entry("F16", scales),
    }
    return parts, values


def gptq(name, matrix, act_order=True, offset=1, seed=1):
    layer, group_of = name[: -len(".weight")], np.arange(matrix.shape[1]) // GROUP
    if act_order:
        group_of = np.random.default_rng(seed).permutation(group_of)
    quantised, zeros, scales, values = integers(matrix, group_of)
    parts = {
        layer + ".qweight": entry("I32", packed(quantised.T).T),
        layer + ".qzeros": entry("I32", packed(zeros - offset + 16 * (zeros < offset))),
        layer + ".scales": entry("F16", scales),
        layer + ".g_idx": entry("I32", group_of.astype(np.int32)),
    }
    return parts, values


FORMATS = {
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4"}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "gptq-in-order": (functools.partial(gptq, act_order=False),
                      {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}),
}


def mixture(folder):
    """A model with random weights and 4 experts a layer, of which tokens take 2."""
    hidden, inner, vocabulary = 256, 512, 1000
    config = dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", hidden_size=hidden, head_dim=32, num_attention_heads=4,
        num_key_value_heads=2, num_hidden_layers=2, vocab_size=vocabulary, intermediate_size=inner, moe_intermediate_size=inner,
        num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[], rms_norm_eps=1e-6,
        rope_theta=1e4, max_position_embeddings=256, hidden_act="silu", tie_word_embeddings=True, attention_bias=False)  # fmt: skip
    random, tensors = np.random.default_rng(5), {}

    def add(name, *shape):
        values = random.normal(size=shape) / np.sqrt(shape[-1]) if len(shape) > 1 else np.ones(shape)
        tensors[f"model.{name}.weight"] = entry("F32", values.astype(np.float32))

    add("embed_tokens", vocabulary, hidden)
    add("norm", hidden)
    for layer in ("layers.0", "layers.1"):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{layer}.{norm}", hidden)
        for name, rows, columns in (("q", 128, hidden), ("k", 64, hidden), ("v", 64, hidden), ("o", hidden, 128)):
            add(f"{layer}.self_attn.{name}_proj", rows, columns)
        for norm in ("q_norm", "k_norm"):
            add(f"{layer}.self_attn.{norm}", 32)
        add(f"{layer}.mlp.gate", 4, hidden)
        for expert in (f"{layer}.mlp.experts.{i}" for i in range(4)):
            for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
                add(f"{expert}.{name}_proj", rows, columns)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors)
    return folder


@unittest.skipUnless(np, "needs numpy")
class Checkpoints(TestCase):
    def model(self, name, tensors, **fields):
        folder = self.copy(MODEL, name, **fields)
        for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
            file.unlink()
        write_safetensors(folder / "model.safetensors", tensors)
        return folder

    def models(self, name, plain=".3.mlp.down_proj", quantise=None):
        """The folders with quantised layers and with their values. Layers whose names have `plain` stay plain."""
        own, fields = FORMATS[name]
        if quantise:
            name = f"{name}-{quantise.__name__}"
        quantise = quantise or own
        small, wide = {}, {}
        for tensor, values in weights().items():
            wide[tensor] = entry("F32", values)
            # Embedding and output head stay plain, too.
            is_quantised = "_proj.weight" in tensor and plain not in tensor
            parts = {tensor: wide[tensor]}
            if is_quantised:
                parts, dequantised = quantise(tensor, values)
                self.assertLess(np.abs(dequantised - values).max(), np.abs(values).max() / 2)
                wide[tensor] = entry("F32", dequantised.astype(np.float32))
            small.update(parts)
        fields = dict(fields, modules_to_not_convert=["model.layers.3.mlp.down_proj", "lm_head"])
        return (
            self.model(f"{name}-small", small, quantization_config=fields),
            self.model(f"{name}-wide", wide),
        )

    def run_model(self, model, ranks, *flags, new=8, tokens=40):
        report, logits = self.dumped(model, [i * 37 % 1000 for i in range(tokens)], *flags, new=new, ranks=ranks)
        return report["answers"][0]["ids"], logits

    def test_logits_are_those_of_the_values(self):
        for name in FORMATS:
            models = self.models(name)
            for dtype, ranks in (("f32", 0), ("f32", 2), ("bf16", 0)):
                with self.subTest(format=name, dtype=dtype, ranks=ranks):
                    small, wide = (self.run_model(model, ranks, "--dtype", dtype, "--weights", "unpacked")
                                   for model in models)
                    self.assertEqual(small, wide)

    def test_weights_stay_in_blocks(self):
        """4.25 to 8.25 bits a weight. Products of few rows round activations to bytes, which changes logits little. Those of
        more rows may be exact."""
        for kind in FORMATS:
            small, wide = self.models(kind)
            _, expected = self.run_model(wide, 0, "--dtype", "f32", new=1, tokens=12)
            # Six ranks have so few inputs of each group that padding would more than double them.
            for ranks in (0, 3, 6) if kind == "gptq" else (0, 3):
                _, logits = self.run_model(small, ranks, "--dtype", "f32", new=1, tokens=12)
                self.assert_near(logits, expected, 0.03, kind, ranks)
                self.assertNotEqual(logits, expected, kind)

    def test_shuffled_inputs(self):
        """Maps of one input are multiplied at once, in blocks if their inputs have the same order. Each rank has the blocks
        of its own inputs."""
        def shuffled(name, matrix):
            return gptq(name, matrix, seed=zlib.crc32(name.encode()))

        kept = {}
        for order, quantise in (("same", gptq), ("own", shuffled)):
            small, wide = self.models("gptq", quantise=quantise)
            found, expected = (self.run_model(model, 2, "--dtype", "f32", "--weights", "unpacked") for model in (small, wide))
            self.assertEqual(found, expected)
            for name, model in ((order, small), ("wide", wide)):
                kept[name] = self.report("-m", model, "--token-ids", "-p", "1 2 3", "-n", 1)["memory"]["weight_bytes"]
        self.assertLess(kept["same"], kept["own"])
        self.assertLess(kept["own"], kept["wide"])

    def test_floats_beside_integers(self):
        """Maps of one input are multiplied at once, unless some are floats of 8 bits and others integers."""
        small, wide = self.models("fp8", plain="k_proj")
        _, expected = self.run_model(wide, 0, "--dtype", "f32", new=1)
        for weights in ("stored", "q8"):
            _, logits = self.run_model(small, 0, "--dtype", "f32", "--weights", weights, new=1)
            self.assert_near(logits, expected, 0.03, weights)

    def test_experts_that_devices_choose(self):
        """Steps of few tokens multiply by all chosen experts at once. Recorded launches change no bit."""
        folder = mixture(self.folder / "mixture")
        tokens = [i * 37 % 1000 for i in range(9)]

        def run(form, graph, new):
            env = {**os.environ, "KVZAP_KERNELS": form, "KVZAP_GRAPH": graph}
            return self.dumped(folder, tokens, "--weights", weights, "--dtype", "bf16", new=new, env=env)[1]

        for weights in ("stored", "q8", "q4"):
            with self.subTest(weights=weights):
                self.assert_near(run("device", "on", 1), run("host", "on", 1), 0.05)
                self.assertEqual(run("device", "on", 8), run("device", "off", 8))

    def test_plan_counts_weights_as_they_are_kept(self):
        small, wide = self.models("awq")
        self.assertEqual(self.plan(small, "--weights", "unpacked"), self.plan(wide))
        planned = json.loads(self.succeed("-m", small, "-c", 100, "--dry-run", "--json", "-").text)
        kept = self.report("-m", small, "--token-ids", "-p", "1 2 3", "-n", 1)["memory"]["weight_bytes"]
        self.assertEqual(planned["total"]["weight_bytes"], kept)

    def test_errors(self):
        small, _ = self.models("gptq")
        config = json.loads((small / "config.json").read_text())
        config["quantization_config"]["bits"] = 8
        (small / "config.json").write_text(json.dumps(config))
        for flags in (("-p", "1"), ("-c", 100, "--dry-run")):
            self.fail_with(kvzap("-m", small, "--token-ids", *flags),
                           "config.json: quantization_config.bits: expected 4, found 8")
        config["quantization_config"].update(bits=4, group_size=32)
        (small / "config.json").write_text(json.dumps(config))
        self.fail_with(kvzap("-m", small, "--token-ids", "-p", "1"), "model.safetensors: tensor model.layers.0.",
                       "_proj.scales: expected shape [6, ", "found shape [3, ")


if __name__ == "__main__":
    unittest.main()
