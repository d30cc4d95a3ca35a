"""Everything that kvzap does, on a model with experts, on one with windows, on a hybrid, on one with latent attention and
on one whose layers share rows: the same commands as for dense models with full attention, with random weights."""
import json
import math
import random
import shutil
import struct
import unittest

from harness import HAVE_HDF5, KVZAP, MODEL, SOURCE, TestCase, on_ranks, run_command, write_safetensors
from test_serve import Server

HIDDEN, DIM, HEADS, KV_HEADS, LAYERS, EXPERTS, WIDTH, VOCABULARY = 32, 16, 4, 2, 2, 8, 24, 1024
WINDOW = 24  # of the second layer
CONFIG = {
    "hidden_size": HIDDEN, "head_dim": DIM, "intermediate_size": WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "tie_word_embeddings": True, "bos_token_id": 1021, "eos_token_id": 1023,
}
EXPERTS_CONFIG = {
    **CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": WIDTH,
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": True,
}
WINDOWS_CONFIG = {
    **CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": True,
    "sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"],
}
KEY_HEADS, GROUP, KEY_DIM, VALUE_DIM, KERNEL = 3, 2, 8, 12, 4  # of the gated delta net in the first layer
HYBRID_CONFIG = {
    **CONFIG, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": KEY_HEADS * GROUP, "linear_key_head_dim": KEY_DIM, "linear_value_head_dim": VALUE_DIM,
    "linear_conv_kernel_dim": KERNEL, "layer_types": ["linear_attention", "full_attention"],
}
RANK, QUERY_RANK, NOPE_DIM, ROPE_DIM, HEAD_VALUES = 24, 20, 12, 8, 10  # of latent attention
LATENT_CONFIG = {
    **{name: value for name, value in CONFIG.items() if name not in ("head_dim", "num_key_value_heads")},
    "architectures": ["YoutuForCausalLM"], "model_type": "youtu", "kv_lora_rank": RANK, "q_lora_rank": QUERY_RANK,
    "qk_nope_head_dim": NOPE_DIM, "qk_rope_head_dim": ROPE_DIM, "v_head_dim": HEAD_VALUES,
}
GLOBAL_DIM, INPUTS = 24, 6  # of Gemma 4: a head of full layers, the inputs of each layer
SHARED_CONFIG = {
    **CONFIG, "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_hidden_layers": 4,
    "num_key_value_heads": 2 * KV_HEADS, "num_global_key_value_heads": KV_HEADS, "attention_k_eq_v": True,
    "global_head_dim": GLOBAL_DIM, "hidden_size_per_layer_input": INPUTS, "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 2, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
del SHARED_CONFIG["rope_theta"]


def add_shared_layers(config, add):
    """The tensors of a Gemma 4."""
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    keys_are_values = config["attention_k_eq_v"]
    add("model.embed_tokens_per_layer.weight", VOCABULARY, layers * INPUTS)
    add("model.per_layer_model_projection.weight", layers * INPUTS, HIDDEN)
    add("model.per_layer_projection_norm.weight", INPUTS)
    for layer, kind in enumerate(config["layer_types"]):
        prefix, is_full = f"model.layers.{layer}.", kind == "full_attention"
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            add(f"{prefix}{norm}_layernorm.weight", HIDDEN)
        dim, kv_heads = (GLOBAL_DIM, KV_HEADS) if is_full else (DIM, config["num_key_value_heads"])
        own = layer < layers - shared
        for name, heads in [("q", HEADS)] + [("k", kv_heads)] * own + [("v", kv_heads)] * (own and not (is_full and keys_are_values)):
            add(f"{prefix}self_attn.{name}_proj.weight", heads * dim, HIDDEN)
        add(f"{prefix}self_attn.o_proj.weight", HIDDEN, HEADS * dim)
        for name in ["q"] + ["k"] * own:
            add(f"{prefix}self_attn.{name}_norm.weight", dim)
        for name, rows, columns in (("gate", WIDTH, HIDDEN), ("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
            add(f"{prefix}mlp.{name}_proj.weight", rows, columns)
        add(f"{prefix}per_layer_input_gate.weight", INPUTS, HIDDEN)
        add(f"{prefix}per_layer_projection.weight", HIDDEN, INPUTS)
        add(f"{prefix}post_per_layer_input_norm.weight", HIDDEN)
        add(f"{prefix}layer_scalar", 1)


def make_model(folder, config):
    """A model with the demo model's tokenizer."""
    for file in MODEL.iterdir():
        if file.name != "model.safetensors":
            shutil.copy(file, folder)
    (folder / "config.json").write_text(json.dumps(config))
    draw = random.Random(7)
    tensors = {}

    def add(name, *shape):
        if name.endswith("A_log"):  # the state forgets slowly
            values = [-4 + 0.2 * draw.uniform(-1, 1) for _ in range(shape[0])]
        elif len(shape) == 1:
            values = [1 + 0.2 * draw.uniform(-1, 1) for _ in range(shape[0])]
        else:
            values = [draw.gauss(0, 2 / math.sqrt(shape[-1])) for _ in range(shape[0] * shape[-1])]
        tensors[name] = ("F32", list(shape), struct.pack(f"<{len(values)}f", *values))

    add("model.embed_tokens.weight", VOCABULARY, HIDDEN)
    add("model.norm.weight", HIDDEN)
    if "num_kv_shared_layers" in config:
        add_shared_layers(config, add)
        return write_safetensors(folder / "model.safetensors", tensors)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{prefix}{norm}.weight", HIDDEN)
        if config.get("layer_types", [""] * LAYERS)[layer] == "linear_attention":
            values = KEY_HEADS * GROUP
            channels = 2 * KEY_HEADS * KEY_DIM + values * VALUE_DIM
            for name, rows in (("qkv", channels), ("z", values * VALUE_DIM), ("b", values), ("a", values)):
                add(f"{prefix}linear_attn.in_proj_{name}.weight", rows, HIDDEN)
            add(f"{prefix}linear_attn.conv1d.weight", channels, 1, KERNEL)
            for name in ("A_log", "dt_bias"):
                add(f"{prefix}linear_attn.{name}", values)
            add(f"{prefix}linear_attn.norm.weight", VALUE_DIM)
            add(f"{prefix}linear_attn.out_proj.weight", HIDDEN, values * VALUE_DIM)
        elif "kv_lora_rank" in config:
            for name, rows, columns in (("q_a_proj", QUERY_RANK, HIDDEN), ("q_b_proj", HEADS * (NOPE_DIM + ROPE_DIM), QUERY_RANK),
                                        ("kv_a_proj_with_mqa", RANK + ROPE_DIM, HIDDEN),
                                        ("kv_b_proj", HEADS * (NOPE_DIM + HEAD_VALUES), RANK),
                                        ("o_proj", HIDDEN, HEADS * HEAD_VALUES)):
                add(f"{prefix}self_attn.{name}.weight", rows, columns)
            for name, extent in (("q_a_layernorm", QUERY_RANK), ("kv_a_layernorm", RANK)):
                add(f"{prefix}self_attn.{name}.weight", extent)
        else:
            rows_of_q = 2 * HEADS if "linear_num_key_heads" in config else HEADS  # with gates
            for name, heads in (("q", rows_of_q), ("k", KV_HEADS), ("v", KV_HEADS)):
                add(f"{prefix}self_attn.{name}_proj.weight", heads * DIM, HIDDEN)
            add(f"{prefix}self_attn.o_proj.weight", HIDDEN, HEADS * DIM)
            for norm in ("q_norm", "k_norm"):
                add(f"{prefix}self_attn.{norm}.weight", DIM)
        parts = [f"{prefix}mlp."]
        if "num_experts" in config:
            add(f"{prefix}mlp.gate.weight", EXPERTS, HIDDEN)
            parts = [f"{prefix}mlp.experts.{expert}." for expert in range(EXPERTS)]
        for part in parts:
            for name, rows, columns in (("gate", WIDTH, HIDDEN), ("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
                add(f"{part}{name}_proj.weight", rows, columns)
    write_safetensors(folder / "model.safetensors", tensors)


class Commands:
    CONFIG = None

    def setUp(self):
        super().setUp()
        self.model = self.folder / "model"
        self.model.mkdir()
        self.make_model()
        self.text = self.folder / "text.txt"
        words = "amber opal emerald garnet topaz jasper agate onyx pearl coral quartz beryl".split()
        draw = random.Random(3)
        self.text.write_text(" ".join(draw.choice(words) for _ in range(150)))
        self.question = ["-f", self.text, "--question", "What is amber?", "-n", "12", "--ignore-eos"]

    def make_model(self):
        make_model(self.model, self.CONFIG)

    def command(self, name, *arguments, ranks=0, **options):
        result = run_command(on_ranks(ranks, [KVZAP, name, *arguments]), **options)
        self.assertEqual(result.code, 0, result)
        self.assertEqual(result.errors, [], result)
        return result

    def answer(self, *arguments, ranks=0):
        file = self.folder / "run.json"
        self.command("run", "-m", self.model, *self.question, "--dtype", "f32", "-q", "--json", file, *arguments,
                     ranks=ranks)
        report = json.loads(file.read_text())
        return report["answers"][0]["ids"], report

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_collect_train_and_prune(self):
        texts = self.folder / "texts.jsonl"
        draw = random.Random(5)
        words = self.text.read_text().split()
        texts.write_text("".join(json.dumps({"text": " ".join(draw.choice(words) for _ in range(120))}) + "\n"
                                 for _ in range(6)))
        pairs, surrogate = self.folder / "pairs.h5", self.folder / "surrogate"
        self.command("collect", "-m", self.model, "-f", texts, "-o", pairs, "--min-tokens", "20", "-q")
        self.command("train", "linear", pairs, "-o", surrogate, "-q")
        full, _ = self.answer()
        self.command("calibrate", "-m", self.model, "--surrogate", surrogate, "-f", texts, "--evict-ratio", "0.5", "--window",
                     "16", "-q")
        pruned = ["--surrogate", surrogate, "--evict-ratio", "0.5", "--window", "16", "--prune", "always"]
        ids, report = self.answer(*pruned)
        self.assertEqual(len(ids), len(full))
        self.assertGreater(report["context"]["evict_ratio"], 0.2)
        snapshot = self.folder / "run.h5"
        for kv_type in ((), ("--kv-type", "q4")):
            _, other = self.answer(*pruned, *kv_type, "--snapshot", snapshot, ranks=2)
            self.command("run", "--resume", snapshot, "-q", "--json", self.folder / "resumed.json")
            resumed = json.loads((self.folder / "resumed.json").read_text())
            for found in (other, resumed):
                self.assertEqual(found["context"]["kept_rows"], report["context"]["kept_rows"])
                answer = found["answers"][0]["ids"]
                # Rows of 4 bits round differences of sums to whole steps, which a random model's ids need not survive.
                self.assertEqual(answer if not kv_type else len(answer), ids if not kv_type else len(ids))

    def test_policies_and_quantised_weights(self):
        full, _ = self.answer()
        for policy in ("knorm", "snapkv", "expected-attention"):
            chunks, report = self.answer("--policy", policy, "--evict-ratio", "0.5", ranks=2)
            self.assertEqual(self.answer("--policy", policy, "--evict-ratio", "0.5")[0], chunks)
            self.assertGreater(report["context"]["evict_ratio"], 0.3)
        self.assertEqual(self.answer("--prefill", "sparse", "--chunk", "40")[0], full)
        self.assertEqual(len(self.answer("--weights", "q8")[0]), len(full))

    def test_bench(self):
        for ranks in (0, 2):
            rows = json.loads(self.command("bench", "-m", self.model, "-p", "40", "-n", "3", "-d", "90", "--evict-ratio", "0,0.5",
                                           "-r", "1", "-q", "-o", "json", ranks=ranks).text)["results"]
            self.assertEqual(len(rows), 4)
            self.assertTrue(all(row["kept_rows"] > 0 for row in rows), rows)

    def test_eval(self):
        tasks, output = self.folder / "tasks.jsonl", self.folder / "eval"
        self.command("make-tasks", "recall", "-o", tasks, "--per-task", "2", "--length", "200", "-m", self.model)
        result = self.command("eval", "-m", self.model, "--tasks", tasks, "--policies", "none;knorm", "--evict-ratios", "0.5",
                              "-o", output, "-q", "--json", "-")
        self.assertIn("knorm", result.text)

    def test_chat_and_serve(self):
        talk = self.command("chat", "-m", self.model, "-f", self.text, "-n", "4", "--policy", "knorm", "--evict-ratio", "0.5",
                            stdin=b"What is amber?\nAnd opal?\n")
        self.assertTrue(talk.text)
        server = Server(model=self.model)
        self.addCleanup(server.kill)
        body = {"messages": [{"role": "user", "content": self.text.read_text()}], "max_tokens": 4,
                "kvzap": {"policy": "knorm", "evict_ratio": 0.5}}
        reply = server.post("/v1/chat/completions", body)
        self.assertEqual(reply["choices"][0]["message"]["role"], "assistant")
        self.assertEqual(server.stop(), 0, server.log())


class Experts(Commands, TestCase):
    CONFIG = EXPERTS_CONFIG


class Windows(Commands, TestCase):
    CONFIG = WINDOWS_CONFIG

    def test_report_is_of_full_layers(self):
        _, report = self.answer("--policy", "knorm", "--evict-ratio", "0.5", "--window", "8")
        cache = report["context"]
        full, window = cache["kept_rows"]
        self.assertEqual(window, [WINDOW - 1] * KV_HEADS)
        self.assertEqual(full, [cache["tokens"] - cache["tokens"] // 2] * KV_HEADS)
        self.assertEqual((cache["evict_ratio_per_layer"][1], cache["unpruned_layers"]), (0, [1]))
        self.assertEqual(cache["evict_ratio"], cache["evict_ratio_per_layer"][0])
        pair = 2 * KV_HEADS * DIM * 4  # bytes
        self.assertEqual(cache["kv"]["full_bytes"], pair * (cache["tokens"] + WINDOW - 1))
        self.assertEqual(cache["kv"]["live_bytes"], pair * (full[0] + WINDOW - 1))

    def test_plan_knows_windows(self):
        plan = json.loads(self.command("run", "-m", self.model, "--dry-run", "-c", "4000", "--json", "-", "--dtype", "f32",
                                       "--policy", "knorm", "--evict-ratio", "0.75").text)["total"]
        pair = 2 * KV_HEADS * DIM * 4
        self.assertEqual(plan["kv_ring_bytes"], pair * (WINDOW - 1))
        self.assertEqual(plan["kv_full_bytes"], pair * (4000 + WINDOW - 1))
        self.assertEqual(plan["kv_kept_bytes"], pair * (1000 + WINDOW - 1))

    def test_window_counts(self):
        """A wider window sees more, and gives another answer; one as wide as all texts is none."""
        narrow, _ = self.answer()
        config = json.loads((self.model / "config.json").read_text())
        (self.model / "config.json").write_text(json.dumps({**config, "sliding_window": 4096}))
        wide, report = self.answer("--policy", "knorm", "--evict-ratio", "0.5")
        self.assertEqual(len(set(map(tuple, report["context"]["kept_rows"]))), 1)
        (self.model / "config.json").write_text(json.dumps({**config, "layer_types": ["full_attention"] * 2}))
        self.assertEqual(self.answer("--policy", "knorm", "--evict-ratio", "0.5")[0], wide)
        self.assertNotEqual(narrow, self.answer()[0])

    def test_nothing_to_prune(self):
        config = json.loads((self.model / "config.json").read_text())
        (self.model / "config.json").write_text(json.dumps({**config, "layer_types": ["sliding_attention"] * 2}))
        self.assertEqual(len(self.answer()[0]), 12)
        result = run_command([KVZAP, "run", "-m", self.model, *self.question, "--policy", "knorm", "--evict-ratio", "0.5"])
        self.assertNotEqual(result.code, 0)
        self.assertIn("nothing can be pruned: no layer", result.err.decode())
        result = run_command([KVZAP, "run", "-m", self.model, "--dry-run", "--policy", "knorm", "--keep-tokens", "9"])
        self.assertIn("nothing can be pruned: no layer", result.err.decode())

    def test_server_continues_conversations(self):
        beginning = {"messages": [{"role": "user", "content": self.text.read_text()[:600]}], "max_tokens": 4, "temperature": 0}
        server = Server(model=self.model)
        self.addCleanup(server.kill)
        expected = server.post("/v1/chat/completions", beginning)["choices"][0]["message"]
        self.assertEqual(server.stop(), 0, server.log())
        server = Server(model=self.model)
        self.addCleanup(server.kill)
        messages = [{"role": "user", "content": self.text.read_text()}]
        usage = []
        for _ in range(2):
            reply = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "temperature": 0})
            usage.append(reply["usage"])
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "And now?"}]
        self.assertGreater(usage[1]["prompt_tokens_details"]["cached_tokens"], usage[0]["prompt_tokens"] // 2)
        # A beginning that the window has forgotten runs again, and is answered as without the longer text.
        other = server.post("/v1/chat/completions", beginning)
        self.assertEqual([choice["message"] for choice in other["choices"]], [expected])
        self.assertEqual(server.stop(), 0, server.log())


class Hybrids(Commands, TestCase):
    CONFIG = HYBRID_CONFIG
    STATE = KEY_HEADS * (GROUP * KEY_DIM * VALUE_DIM + (KERNEL - 1) * (2 * KEY_DIM + GROUP * VALUE_DIM)) * 4  # bytes
    PLANNED = 2 * STATE  # with the state that a step makes
    RANKS = ((0, 2), (2, 0), (4, 2), (3, 4))  # that write a snapshot and that read it
    PLACED = KV_HEADS

    def test_report_is_of_full_layers(self):
        _, report = self.answer("--policy", "knorm", "--evict-ratio", "0.5", "--window", "8")
        cache = report["context"]
        self.assertEqual(cache["kept_rows"], [[0] * KV_HEADS, [cache["tokens"] - cache["tokens"] // 2] * KV_HEADS])
        self.assertEqual(cache["unpruned_layers"], [0])
        self.assertEqual(cache["evict_ratio"], cache["evict_ratio_per_layer"][1])
        self.assertEqual(cache["kv"]["full_bytes"], 2 * KV_HEADS * DIM * 4 * cache["tokens"])

    def test_plan_knows_states(self):
        for ranks, key_heads in ((0, [3]), (2, [2, 1]), (4, [1, 1, 1, 0])):
            plan = json.loads(self.command("run", "-m", self.model, "--dry-run", "-c", "4000", "--json", "-", "--dtype", "f32",
                                           "--policy", "knorm", "--evict-ratio", "0.75", ranks=ranks).text)
            self.assertEqual(sum(key_heads), KEY_HEADS)
            self.assertEqual([rank["state_bytes"] for rank in plan["ranks"]],
                             [heads * self.PLANNED // KEY_HEADS for heads in key_heads])
            total, pair = plan["total"], 2 * KV_HEADS * DIM * 4
            self.assertEqual(total["state_bytes"], self.PLANNED)
            self.assertEqual(total["kv_full_bytes"], pair * 4000 + self.PLANNED)
            self.assertEqual(total["kv_kept_bytes"], pair * 1000 + self.PLANNED)

    def test_state_counts(self):
        """The answer depends on the text through the state alone, if the layer with attention is gone."""
        config = json.loads((self.model / "config.json").read_text())
        (self.model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1,
                                                            "layer_types": ["linear_attention"]}))
        first, _ = self.answer()
        self.assertEqual(self.answer("--prefill", "sparse", "--chunk", "7", ranks=2)[0], first)
        self.text.write_text(self.text.read_text().replace("amber", "zircon"))
        self.assertNotEqual(self.answer()[0], first)
        result = run_command([KVZAP, "run", "-m", self.model, *self.question, "--policy", "knorm", "--evict-ratio", "0.5"])
        self.assertNotEqual(result.code, 0)
        self.assertIn("nothing can be pruned: no layer", result.err.decode())

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_snapshots_of_other_ranks(self):
        """Questions about one context cut the sequence back to its end; a snapshot has both states."""
        questions = ["-f", self.text, "--question", "What is amber?", "--question", "What is opal?", "-n", "12", "--ignore-eos",
                     "--dtype", "f32", "-q"]
        expected, file = self.folder / "expected.json", self.folder / "run.h5"
        self.command("run", "-m", self.model, *questions, "--json", expected)
        answers = [answer["ids"] for answer in json.loads(expected.read_text())["answers"]]
        self.assertEqual(len(answers), 2)
        # The last run gives rank 0 the last KV head.
        placement = self.folder / "placement.json"
        config = json.loads((self.model / "config.json").read_text())
        layers = config.get("num_hidden_layers") or len(config["layers_block_type"])
        placement.write_text(json.dumps({"context": {"kept_rows": [[*range(self.PLACED)]] * layers}}))
        for i, (ranks, other) in enumerate((*self.RANKS, (max(ranks for ranks, _ in self.RANKS), 0))):
            flags = ("--placement", placement) if i == len(self.RANKS) else ()
            self.command("run", "-m", self.model, *questions, *flags, "--snapshot", file, "--snapshot-compress", 4 * (i % 2),
                         ranks=ranks)
            self.assertIn("match", self.command("inspect", file, "--verify").text)
            resumed = self.folder / "resumed.json"
            self.command("run", "--resume", file, "-q", "--json", resumed, ranks=other)
            self.assertEqual([answer["ids"] for answer in json.loads(resumed.read_text())["answers"]], answers)

    def test_server_continues_conversations(self):
        server = Server(model=self.model)
        self.addCleanup(server.kill)
        messages = [{"role": "user", "content": self.text.read_text()}]
        usage, answers = [], []
        for _ in range(2):
            reply = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, "temperature": 0})
            usage.append(reply["usage"])
            answers.append(reply["choices"][0]["message"])
            messages += [answers[-1], {"role": "user", "content": "And now?"}]
        self.assertGreater(usage[1]["prompt_tokens_details"]["cached_tokens"], usage[0]["prompt_tokens"] // 2)
        self.assertEqual(server.stop(), 0, server.log())
        server = Server(model=self.model)
        self.addCleanup(server.kill)
        reply = server.post("/v1/chat/completions", {"messages": messages[:3], "max_tokens": 4, "temperature": 0})
        self.assertEqual(reply["choices"][0]["message"], answers[1])
        self.assertEqual(server.stop(), 0, server.log())


class Latent(Commands, TestCase):
    CONFIG = LATENT_CONFIG
    ROW = (RANK + ROPE_DIM) * 4  # bytes of a row in f32

    def test_rows_are_stored_once(self):
        _, report = self.answer("--policy", "knorm", "--evict-ratio", "0.5", "--window", "8")
        cache = report["context"]
        kept = cache["tokens"] - cache["tokens"] // 2
        self.assertEqual(cache["kept_rows"], [[kept]] * LAYERS)
        self.assertEqual(cache["kv"]["full_bytes"], LAYERS * self.ROW * cache["tokens"])
        self.assertEqual(cache["kv"]["live_bytes"], LAYERS * self.ROW * kept)
        plan = json.loads(self.command("run", "-m", self.model, "--dry-run", "-c", "4000", "--json", "-", "--dtype", "f32",
                                       "--policy", "knorm", "--evict-ratio", "0.75").text)["total"]
        self.assertEqual(plan["kv_full_bytes"], LAYERS * self.ROW * 4000)
        self.assertEqual(plan["kv_kept_bytes"], LAYERS * self.ROW * 1000)

    def test_policies_that_read_values_and_output_weights(self):
        for policy in ("keydiff", "kvzip-plus", "snapkv+critical", "lagkv", "h2o", "compactor"):
            ids, report = self.answer("--policy", policy, "--evict-ratio", "0.5")
            self.assertGreater(report["context"]["evict_ratio"], 0.3, policy)
            self.assertEqual(self.answer("--policy", policy, "--evict-ratio", "0.5", ranks=3)[0], ids, policy)

    def test_kv_types(self):
        full, _ = self.answer()
        self.assertEqual(len(self.answer("--kv-type", "q8", "--window", "8", ranks=2)[0]), len(full))
        result = run_command([KVZAP, "run", "-m", self.model, *self.question, "--kv-type", "q8,q4"])
        self.assertNotEqual(result.code, 0)
        self.assertIn("one vector for a token's key and value; expected one type", result.err.decode())

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_snapshots_of_other_ranks(self):
        expected, _ = self.answer("--policy", "knorm", "--evict-ratio", "0.5", "--window", "16")
        file, resumed = self.folder / "run.h5", self.folder / "resumed.json"
        for compress, ranks, other in (("0", 0, 2), ("4", 2, 0), ("0", 3, 0)):
            self.answer("--policy", "knorm", "--evict-ratio", "0.5", "--window", "16", "--snapshot", file, "--snapshot-compress",
                        compress, ranks=ranks)
            self.assertIn("match", self.command("inspect", file, "--verify").text)
            self.command("run", "--resume", file, "-q", "--json", resumed, ranks=other)
            self.assertEqual(json.loads(resumed.read_text())["answers"][0]["ids"], expected)

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_snapshots_of_another_type(self):
        """A file has each row once, in the type that is asked for, and says so."""
        file, resumed = self.folder / "run.h5", self.folder / "resumed.json"
        for flags in ((), ("--kv-type", "q8")):
            expected, report = self.answer(*flags, "--window", "8", "--snapshot", file, "--snapshot-dtype", "f32")
            self.command("run", "--resume", file, "-q", "--json", resumed, ranks=2)
            self.assertEqual(json.loads(resumed.read_text())["answers"][0]["ids"], expected)
            seen = json.loads(self.command("inspect", file, "--json").text)
            rows = LAYERS * seen["tokens"]
            self.assertEqual((seen["kept"], seen["kv_bytes"], seen["full_kv_bytes"]), (rows, rows * self.ROW, rows * self.ROW))

    def test_short_texts_of_models_with_an_indexer(self):
        config = {**LATENT_CONFIG, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 600,
                  "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                  "mlp_layer_types": ["dense"] * LAYERS}
        (self.model / "config.json").write_text(json.dumps(config))
        self.assertEqual(len(self.answer()[0]), 12)
        self.text.write_text(" ".join([self.text.read_text()] * 4))
        result = run_command([KVZAP, "run", "-m", self.model, *self.question])
        self.assertNotEqual(result.code, 0)
        self.assertIn("600", result.err.decode())


class SharedRows(Commands, TestCase):
    """Layers 2 and 3 read the rows of layers 0 and 1. Those with windows have two KV heads for one of the others."""
    CONFIG = SHARED_CONFIG
    RANKS = ((0, 2), (2, 0))
    PLACED = KV_HEADS
    test_snapshots_of_other_ranks = Hybrids.test_snapshots_of_other_ranks
    test_server_continues_conversations = Windows.test_server_continues_conversations
    FULL_PAIR, WINDOW_PAIR = 2 * KV_HEADS * GLOBAL_DIM * 4, 2 * 2 * KV_HEADS * DIM * 4  # bytes

    def test_report_is_of_owners(self):
        _, report = self.answer("--policy", "knorm", "--evict-ratio", "0.5", "--window", "8")
        cache = report["context"]
        kept = cache["tokens"] - cache["tokens"] // 2
        self.assertEqual(cache["kept_rows"], [[rows] * KV_HEADS for rows in (WINDOW - 1, kept, 0, 0)])
        self.assertEqual(cache["unpruned_layers"], [0, 2, 3])
        self.assertEqual(cache["evict_ratio"], cache["evict_ratio_per_layer"][1])
        self.assertEqual(cache["kv"]["live_bytes"], self.FULL_PAIR * kept + self.WINDOW_PAIR * (WINDOW - 1))

    def test_plan_knows_owners(self):
        plan = json.loads(self.command("run", "-m", self.model, "--dry-run", "-c", "4000", "--json", "-", "--dtype", "f32",
                                       "--policy", "knorm", "--evict-ratio", "0.75").text)["total"]
        self.assertEqual(plan["kv_ring_bytes"], self.WINDOW_PAIR * (WINDOW - 1))
        self.assertEqual(plan["kv_full_bytes"], self.FULL_PAIR * 4000 + plan["kv_ring_bytes"])
        self.assertEqual(plan["kv_kept_bytes"], self.FULL_PAIR * 1000 + plan["kv_ring_bytes"])
        size = (self.model / "model.safetensors").stat().st_size
        self.assertAlmostEqual(plan["weight_bytes"], size, delta=0.05 * size)

    def test_more_ranks_than_heads(self):
        result = run_command(on_ranks(3, [KVZAP, "run", "-m", self.model, *self.question]))
        self.assertNotEqual(result.code, 0)
        self.assertIn("the KV heads of full layers", result.err.decode())

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_quantised_rows(self):
        """All layers that read rows read the same quantised ones, in one process and after a snapshot on two ranks."""
        file = self.folder / "run.h5"
        for flags in (("--kv-type", "q8"), ("--kv-type", "q8", "--policy", "knorm", "--evict-ratio", "0.5")):
            expected, _ = self.answer(*flags, "--window", "16")
            self.assertEqual(self.answer(*flags, "--window", "16", "--snapshot", file, ranks=2)[0], expected)
            self.command("run", "--resume", file, "-q", "--json", self.folder / "resumed.json")
            resumed = json.loads((self.folder / "resumed.json").read_text())
            self.assertEqual(resumed["answers"][0]["ids"], expected)


class SharedRowsOnManyRanks(Commands, TestCase):
    """With as many KV heads in all layers, more ranks share the heads."""
    CONFIG = {**SHARED_CONFIG, "num_key_value_heads": KV_HEADS, "attention_k_eq_v": False}
    RANKS = Hybrids.RANKS
    PLACED = KV_HEADS
    test_snapshots_of_other_ranks = Hybrids.test_snapshots_of_other_ranks

    def test_long_prefill(self):
        """Teams of ranks share a prefill's new rows where a layer has its own."""
        expected, _ = self.answer()
        for ranks in (3, 4):
            self.assertEqual(self.answer(ranks=ranks)[0], expected)
            self.assertEqual(self.answer("--prefill", "sparse", "--chunk", "90", ranks=ranks)[0], expected)


class FalconH1(Hybrids):
    """Rows and a state in each layer."""
    GOLDEN = "falcon_h1"
    test_report_is_of_full_layers = test_plan_knows_states = test_state_counts = test_collect_train_and_prune = None

    def make_model(self):
        """A model of tests/golden/families, with the demo model's tokenizer and random embeddings of its tokens."""
        golden = SOURCE / "tests/golden/families" / self.GOLDEN
        for file in MODEL.iterdir():
            if file.name != "model.safetensors":
                shutil.copy(file, self.model)
        config = json.loads((golden / "config.json").read_text())
        draw, vocabulary = random.Random(7), config["vocab_size"]
        config.update(vocab_size=VOCABULARY, eos_token_id=1023)
        (self.model / "config.json").write_text(json.dumps(config))
        data = (golden / "model.safetensors").read_bytes()
        begin = 8 + int.from_bytes(data[:8], "little")
        tensors = {}
        for name, entry in json.loads(data[8:begin]).items():
            if name == "__metadata__":
                continue
            first, last = (begin + offset for offset in entry["data_offsets"])
            tensors[name] = (entry["dtype"], entry["shape"], data[first:last])
            if entry["shape"][0] == vocabulary:
                shape = [VOCABULARY, entry["shape"][1]]
                values = [draw.gauss(0, 0.3) for _ in range(shape[0] * shape[1])]
                tensors[name] = ("F32", shape, struct.pack(f"<{len(values)}f", *values))
        write_safetensors(self.model / "model.safetensors", tensors)


class NemotronH(FalconH1):
    """Layers that keep rows, a state or nothing."""
    GOLDEN = "nemotron_h"


class Jamba(FalconH1):
    """State spaces of Mamba-1, and experts."""
    GOLDEN = "jamba"
    PLACED = 3


class Zamba2(FalconH1):
    """Attention before a state space, by weights that layers share."""
    GOLDEN = "zamba2"
    PLACED = 4


class Lfm2(FalconH1):
    """Short convolutions."""
    GOLDEN = "lfm2_moe"


class KimiLinear(FalconH1):
    """States beside rows of latents."""
    GOLDEN = "kimi_linear"
    PLACED = 1


class MiniMax(FalconH1):
    """States without convolutions."""
    GOLDEN = "minimax"
    PLACED = 3


class PublishedModels(TestCase):
    """Memory from config.json alone: layers that see all tokens, layers with rings of so many rows, and bytes of a row."""

    PLANS = {"Qwen3-30B-A3B": (48, 0, 0, 4 * 128), "gpt-oss-20b": (12, 12, 127, 8 * 64),
             "gemma-3-27b-it": (10, 52, 1023, 16 * 128), "Llama-4-Scout-17B-16E": (12, 36, 8192, 8 * 128)}
    WEIGHTS = {"Qwen3-30B-A3B": 30.5e9, "gpt-oss-20b": 20.9e9, "gemma-3-27b-it": 27.0e9, "Llama-4-Scout-17B-16E": 107.8e9}

    def test_plans(self):
        tokens, kept = 131072, 131072 - int(131072 * 0.75)
        for name, (full, windows, ring, values) in self.PLANS.items():
            flags = ["--rope-scaling", "yarn", "--rope-scale", "4"] if name.startswith("Qwen3") else []
            result = run_command([KVZAP, "run", "-m", SOURCE / "inputs/configs" / name, "--dry-run", "-c", tokens, "--dtype",
                                  "bf16", "--policy", "knorm", "--evict-ratio", "0.75", "--json", "-", *flags])
            self.assertEqual(result.code, 0, result)
            plan = json.loads(result.text)["total"]
            row = 2 * 2 * values
            self.assertEqual(plan["kv_ring_bytes"], windows * ring * row, name)
            self.assertEqual(plan["kv_full_bytes"], (full * tokens + windows * ring) * row, name)
            self.assertEqual(plan["kv_kept_bytes"], (full * kept + windows * ring) * row, name)
            self.assertAlmostEqual(plan["weight_bytes"] / 2, self.WEIGHTS[name], delta=0.01 * self.WEIGHTS[name])

    def test_plan_of_a_hybrid(self):
        result = run_command([KVZAP, "run", "-m", SOURCE / "inputs/configs/Qwen3-Next-80B-A3B-Instruct", "--dry-run", "-c",
                              262144, "--dtype", "bf16", "--policy", "knorm", "--evict-ratio", "0.75", "--json", "-"])
        self.assertEqual((result.code, result.errors), (0, []))
        plan = json.loads(result.text)["total"]
        values = 32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)  # of states, and of the convolution's inputs
        self.assertEqual(plan["state_bytes"], 2 * 36 * values * 4)  # with those that a step makes
        row = 2 * 2 * 2 * 256
        self.assertEqual(plan["kv_full_bytes"], 12 * 262144 * row + plan["state_bytes"])
        self.assertEqual(plan["kv_kept_bytes"], 12 * 65536 * row + plan["state_bytes"])
        self.assertAlmostEqual(plan["weight_bytes"] / 2, 79.7e9, delta=0.01 * 79.7e9)


if __name__ == "__main__":
    unittest.main()
