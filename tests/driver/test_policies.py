"""Eviction policies as the program names them: their list, options and errors, budgets, the dump."""
import array
import json
import math
import os
import re
import struct
import unittest

from harness import (CASES, HAVE_HDF5, KVZAP, LINEAR, MLP, MODEL, SOURCE, TestCase, kept_rows, kvzap,
                     read_safetensors, run_command, write_safetensors)

CASE = CASES[0]
TOKENS = CASE["n_context"]
LAYERS, HEADS, HEAD_DIM, VOCABULARY = 6, 4, 32, 1024
ASK = ["-m", MODEL, "-p", CASE["context"], "--question", CASE["question"]]

# Of the issue that asked for them; `kvzap policies` may list more.
POLICIES = {
    "knorm", "random", "streaming-llm", "keydiff", "lagkv", "leverage", "cur", "compactor", "qfilter", "cap",
    "snapkv", "tova", "h2o", "scissorhands", "pyramidkv", "expected-attention", "non-causal", "simlayerkv",
    "finch", "kvzap", "fastkvzip", "trim-kv", "duo-attention",
}
MODIFIERS = {
    "ada", "pyramid", "global", "per-layer", "per-head", "critical", "chunk", "chunkkv", "kvcrush", "dms", "merge", "cam", "rerotate", "fit",
}


def policies(*arguments, **options):
    return run_command([KVZAP, "policies", *arguments], **options)


class Listing(TestCase):
    def listed(self, *arguments):
        result = policies(*arguments)
        self.assertEqual((result.code, result.err), (0, b""), result)
        return result.text

    def test_json(self):
        whole = json.loads(self.listed("--json"))
        self.assertEqual((whole["format"], whole["format_version"]), ("kvzap.policies", 1))
        by_name = {policy["name"]: policy for policy in whole["policies"]}
        self.assertLessEqual(POLICIES, set(by_name))
        self.assertLessEqual(MODIFIERS, {modifier["name"] for modifier in whole["modifiers"]})
        for policy in whole["policies"]:
            for key in ("paper", "formula", "needs", "cost"):
                self.assertTrue(policy[key], (policy["name"], key))
        for info in whole["policies"] + whole["modifiers"]:
            for parameter in info["parameters"]:
                with self.subTest(of=info["name"], parameter=parameter["name"]):
                    self.check_parameter(parameter)
        self.assertTrue(by_name["finch"]["needs_question"])
        self.assertTrue(by_name["simlayerkv"]["has_own_budget"])
        self.assertTrue(by_name["knorm"]["judges_tokens"])

    def check_parameter(self, parameter):
        self.assertTrue(parameter["help"])
        self.assertIn(parameter["kind"], ("integer", "number", "flag", "text", "file"))
        self.assertFalse(parameter["required"] and parameter["default"])
        default = parameter["default"]
        if default is None:
            return
        if parameter["kind"] in ("integer", "number"):
            value = int(default) if parameter["kind"] == "integer" else float(default)
            least, most = parameter["least"], parameter["most"]
            self.assertGreaterEqual(value, -math.inf if least is None else least)
            self.assertLessEqual(value, math.inf if most is None else most)
        if parameter["kind"] == "flag":
            self.assertIn(default, ("on", "off"))
        if parameter["kind"] == "text" and parameter["choices"]:
            self.assertIn(default, parameter["choices"])

    def test_unknown(self):
        self.fail_with(policies("snpkv"), "'snpkv' is not a policy or modifier", "did you mean snapkv?", code=2)

    def test_needs_nothing_to_be_started(self):
        environment = {**os.environ, "OMPI_MCA_btl": "none", "PMIX_MCA_gds": "none"}
        self.assertEqual(policies(env=environment).code, 0)


class Documents(TestCase):
    def test_has_every_policy(self):
        page = (SOURCE / "docs/reference/policies.md").read_text()
        listed = json.loads(policies("--json").text)
        for heading, kind, mark in (("Policies", "policies", ""), ("Modifiers", "modifiers", "+")):
            section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
            names = re.findall(r"(?m)^\| `([^`]+)` \|", section)
            self.assertEqual(names, [mark + info["name"] for info in listed[kind]])

    def test_shows_the_example(self):
        code = (SOURCE / "examples/custom_policy.cpp").read_text().split("// [policy]\n")[1]
        page = (SOURCE / "docs/developers/policies.md").read_text()
        self.assertIn(f"```cpp\n{code}```\n", page)


class Options(TestCase):
    def test_errors(self):
        """Before weights are loaded, which this model does not have."""
        model = self.copy(MODEL, "model")
        (model / "model.safetensors").write_bytes(b"bad")
        result = kvzap("-m", model, "-p", "one", "--policy", "snapkv", "--kv-budget", "100")
        self.assertNotIn("model.safetensors", str(result))
        self.fail_with(result, "--kv-budget: ", "100 bytes", "below the minimum", "3072", code=2)
        for ranks in (0, 2, 3):
            result = kvzap("-m", model, "-p", "one", "--policy", "snpkv", "--evict-ratio", "0.5", ranks=ranks)
            self.assertNotIn("model.safetensors", str(result))
            self.fail_with(result, "snpkv", "did you mean snapkv?", code=2)

    def test_texts_to_learn_from(self):
        """Before weights are loaded, too."""
        model = self.copy(MODEL, "model")
        (model / "model.safetensors").write_bytes(b"bad")
        file = self.folder / "texts"

        def refuse(text, *parts, flags=("-p", "one"), ranks=0, more="", code=1):
            file.write_text(text)
            result = kvzap("-m", model, *flags, "--policy", f"duo-attention:texts={file}{more}", ranks=ranks)
            self.assertNotIn("model.safetensors", str(result))
            self.fail_with(result, *parts, code=code)

        for ranks in (0, 2):
            refuse("\n", file, "there is no text in it", ranks=ranks)
        refuse('{"text": "one"}\n{"words": "two"}\n', f"{file}: line 2: text: expected a string, found none")
        refuse("one", "tokens", '"0"', "from 1", more=",tokens=0", code=2)
        refuse("one", "needs only one of pattern=FILE", "texts=FILE", more=f",pattern={model}")
        self.fail_with(kvzap("-m", model, "-p", "one", "--policy", "duo-attention"), "pattern=FILE", "texts=FILE")
        self.fail_with(kvzap("-m", model, "-p", "one", "--policy", "duo-attention:texts=none"), "no such file")
        (model / "tokenizer.json").unlink()
        for ranks in (0, 2):
            refuse("one", file, "need the model's tokenizer", "tokenizer.json", flags=("--token-ids", "-p", "1 2"),
                   ranks=ranks)

    def test_file_of_another_model(self):
        model = self.copy(MODEL, "model")
        (model / "model.safetensors").write_bytes(b"bad")
        other = self.copy(LINEAR, "other", output_dim=8)
        for ranks in (0, 2):
            result = kvzap("-m", model, "-p", "one", "--surrogate", other, "--keep-tokens", "5", ranks=ranks)
            self.fail_with(result, other / "config.json", "output_dim is 8", "another model", code=1)

    def test_deck(self):
        deck = self.folder / "deck.toml"
        deck.write_text(f"""
            model = "{MODEL}"
            prompt = "one two three four five six seven eight"
            question = "nine"
            policy = "streaming-llm:sink=2"
            keep-tokens = 5
            prune-after = "context"
            decode-every = 3
            decode-keep = 4
            n-predict = 6
            ignore-eos = true
            """)
        report = self.report("--config", deck)
        self.assertEqual(report["policy"], "streaming-llm:sink=2")
        self.assertEqual({rows for layer in report["context"]["kept_rows"] for rows in layer}, {5})
        options = report["options"]
        self.assertEqual((options["keep_tokens"], options["decode_every"], options["decode_keep"]), (5, 3, 4))
        deck.write_text('policy = "snapkv"\nevict-ratio = 1.5\nmodel = "x"')
        self.fail_with(kvzap("--config", deck), "--evict-ratio is 1.5")
        deck.write_text('polcy = "snapkv"')
        self.fail_with(kvzap("--config", deck), ":1: polcy: unknown key", "'policy'")

    def test_dry_run(self):
        def plan(*flags):
            flags = ["-m", MODEL, "-c", "1000", "--dry-run", "--json", "-", *flags]
            return json.loads(self.succeed(*flags).out)

        row = 2 * HEAD_DIM * 2 * LAYERS * HEADS
        full = plan()["total"]["kv_kept_bytes"]
        self.assertEqual(full, 1000 * row)
        # Without a policy the window stays.
        self.assertEqual(plan("--evict-ratio", "0.95")["total"]["kv_kept_bytes"], 128 * row)
        self.assertEqual(plan("--policy", "knorm", "--evict-ratio", "0.95")["total"]["kv_kept_bytes"], 50 * row)
        for keep in (1, 33, 333, 999, 1000, 5000):
            planned = plan("--policy", "knorm", "--keep-tokens", keep)
            self.assertEqual(planned["total"]["kv_kept_bytes"], min(1000, keep) * row)
            self.assertAlmostEqual(planned["evict_ratio"], 1 - min(1000, keep) / 1000)
        for size, rows in ((str(100 * row), 100), (f"{7 * row / 1024}KiB", 7), (f"{77.9 * row / 1e6}MB", 77)):
            self.assertEqual(plan("--policy", "knorm", "--kv-budget", size)["total"]["kv_kept_bytes"], rows * row)
            self.assertEqual(plan("--kv-budget", size)["total"]["kv_kept_bytes"], rows * row)
        result = kvzap("-m", MODEL, "-c", "1000", "--dry-run", "--kv-budget", "5k")
        self.assertEqual(result.code, 0, result)
        self.fail_with(kvzap("-m", MODEL, "-c", "1000", "--dry-run", "--kv-budget", "3k"), "below the minimum")
        # Modifiers that say how much stays.
        ratios = self.folder / "ratios"
        ratios.write_text("0.9 0.9 0.9 0.1 0.1 0.1")
        self.assertEqual(plan("--policy", f"snapkv+per-layer:ratios={ratios}")["total"]["kv_kept_bytes"], 500 * row)
        heads = self.folder / "heads.json"
        heads.write_text(json.dumps([[0.9] * HEADS] * 3 + [[0.1] * HEADS] * 3))
        self.assertEqual(plan("--policy", f"snapkv+per-head:ratios={heads}")["total"]["kv_kept_bytes"], 500 * row)
        planned = plan("--policy", "snapkv+chunkkv:length=100", "--keep-tokens", "199")
        self.assertEqual(planned["total"]["kv_kept_bytes"], 100 * row)
        self.fail_with(kvzap("-m", MODEL, "-c", "1000", "--dry-run", "--policy", "snapkv+chunkkv:length=100",
                             "--keep-tokens", "99"), "minimum, 100")

    def test_plans_refuse_what_runs_refuse(self):
        gates, hidden, units = self.folder / "gates.safetensors", 256, 2
        shapes = {"linear1.weight": [units, hidden], "linear1.bias": [units], "linear2.weight": [HEADS, units], "bias": [HEADS]}
        nan = struct.pack("<f", math.nan)
        write_safetensors(gates, {f"model.layers.{layer}.self_attn.retention_gate.{name}": ("F32", shape, nan * math.prod(shape))
                                  for layer in range(LAYERS) for name, shape in shapes.items()})
        for flags, words in [
            (["--policy", "knorm+merge", "--threshold", "0.1"], "merge takes up the rows"),
            (["--policy", "knorm+kvcrush", "--threshold", "0.1"], "kvcrush divides a budget"),
            (["--policy", "kvcompose", "--threshold", "0.1"], "--threshold cannot be combined with --policy kvcompose"),
            (["--policy", f"trim-kv:gates={gates}", "--evict-ratio", "0.5"], "is nan; expected finite numbers"),
            (["--policy", "h2o+rerotate", "--evict-ratio", "0.5", "--decode-every", "8", "--decode-keep", "9"],
             "--decode-every cannot be combined with --policy h2o: it scores rows by their age"),
        ]:
            with self.subTest(flags=flags):
                ran = self.fail_with(kvzap(*ASK, *flags), words)
                planned = self.fail_with(kvzap("-m", MODEL, "-c", "1000", "--dry-run", *flags), words)
                self.assertEqual((planned.code, planned.errors), (ran.code, ran.errors))


class Budgets(TestCase):
    def test_heads(self):
        ratios = [[(layer * HEADS + head) / 25 for head in range(HEADS)] for layer in range(LAYERS)]
        file = self.folder / "heads.json"
        file.write_text(json.dumps(ratios))
        placement = self.folder / "placement"
        placement.write_text(json.dumps({"context": {"kept_rows": [[1000 if head == layer % HEADS else 1 for head in range(HEADS)]
                                                                   for layer in range(LAYERS)]}}))
        found = []
        for ranks, flags in ((0, []), (2, []), (3, []), (4, ["--placement", placement])):
            for prefill in ([], ["--prefill", "sparse", "--chunk", "64"]):
                report = self.report(*ASK, "--policy", f"snapkv+per-head:ratios={file}", "-n", "2", *flags, *prefill, ranks=ranks)
                found.append(report["context"]["kept_rows"])
        for of_layer, kept in zip(ratios, found[0]):
            shares = [TOKENS * (1 - ratio) for ratio in of_layer]
            self.assertTrue(all(abs(rows - share) < 1 for rows, share in zip(kept, shares)), (kept, shares))
            self.assertEqual(sum(kept), round(sum(shares)))
        for other in found[1:]:
            self.assertEqual(other, found[0])
        # Of the layers that run, or of all.
        few = self.folder / "few.json"
        few.write_text(json.dumps(ratios[:3]))
        layers = self.folder / "layers"
        layers.write_text("0.1 0.2 0.3")
        arguments = [*ASK, "-n", "2", "--json", "-", "-q", "--layers", "3", "--policy"]
        for table in (few, file):
            report = json.loads(self.succeed(*arguments, f"snapkv+per-head:ratios={table}").out)
            self.assertEqual(report["context"]["kept_rows"], found[0][:3])
            self.succeed(*arguments, f"snapkv+per-head:ratios={table}", "--dry-run")
        self.succeed(*arguments, f"snapkv+per-layer:ratios={layers}")
        self.fail_with(kvzap(*ASK, "--policy", f"knorm+per-head:ratios={few}"), f"{few}: shape: expected ({LAYERS}, {HEADS})")
        self.fail_with(kvzap(*ASK, "--policy", f"knorm+per-layer:ratios={layers}"), f"3 evict ratios; the model has {LAYERS} layers")
        file.write_text("[[0.5]]")
        result = kvzap(*ASK, "--policy", f"knorm+per-head:ratios={file}", ranks=2)
        self.fail_with(result, f"{file}: shape: expected ({LAYERS}, {HEADS})")

    def rows(self, report, cache=None):
        return {rows for layer in (cache or report["context"])["kept_rows"] for rows in layer}

    def test_amounts(self):
        row = 2 * HEAD_DIM * 2 * LAYERS * HEADS  # in bf16
        for ranks in (0, 2):
            for flags, rows, key, value in [
                (["--evict-ratio", "0.5"], TOKENS // 2, "evict_ratio", 0.5),
                (["--keep-tokens", "37"], 37, "keep_tokens", 37),
                (["--kv-budget", str(41 * row + 1)], 41, "kv_budget_bytes", 41 * row + 1),
            ]:
                report = self.report(*ASK, "--policy", "knorm", *flags, ranks=ranks)
                self.assertEqual(self.rows(report), {rows})
                self.assertEqual(report["policy"], "knorm")
                self.assertEqual(report["options"][key], value)
                self.assertEqual({"evict_ratio", "keep_tokens", "kv_budget_bytes", "threshold"}
                                 & set(report["options"]), {key})
                self.assertFalse(report["context"]["kv"]["full_at_first"])

    def test_texts_to_learn_from(self):
        file = SOURCE / "tests/golden/policies/texts.jsonl"
        plain = self.folder / "texts"
        texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
        plain.write_text("".join(text.replace("\n", " ") + "\n" for text in texts))
        case = CASES[1]
        ask = ["-m", MODEL, "-p", case["context"], "--question", case["question"], "--dtype", "f32"]
        tokens = case["n_context"]
        reports = [self.report(*ask, "--policy", f"duo-attention:texts={name},head-evict-ratio=0.5", ranks=ranks)
                   for name, ranks in ((file, 0), (file, 2), (file, 3), (plain, 0))]
        for report in reports:
            rows = [rows for layer in report["context"]["kept_rows"] for rows in layer]
            self.assertEqual(sorted(rows), [128 + 256] * 12 + [tokens] * 12)
            self.assertEqual(report["texts"]["count"], len(texts))
            self.assertGreater(report["texts"]["seconds"], 0)
        for report in reports[1:3]:
            self.assertEqual(report["context"]["kept_rows"], reports[0]["context"]["kept_rows"])
            self.assertEqual(report["answers"][0]["ids"], reports[0]["answers"][0]["ids"])
        # The prompt's token ids need no tokenizer; texts do.
        self.assertNotIn("texts", self.report(*ask, "--policy", "knorm", "--evict-ratio", "0.5"))
        policy = f"duo-attention:texts={file},head-evict-ratio=0.5"
        text = self.succeed("-m", MODEL, "--token-ids", "-p", "5 6 7", "-n", "1", "--policy", policy).err.decode()
        self.assertIn(f"the policy's {len(texts)} texts", text)

    def test_surrogate_is_policy_kvzap(self):
        half = ["--keep-tokens", str(TOKENS // 2), "--dtype", "f32"]  # (for an evict ratio it would look a threshold up)
        short = self.report(*ASK, "--surrogate", MLP, *half)
        named = self.report(*ASK, "--policy", "kvzap", "--surrogate", MLP, *half)
        whole = self.report(*ASK, "--policy", f"kvzap:surrogate={MLP}", *half, ranks=2)
        self.assertEqual(short["policy"], f"kvzap:surrogate={MLP}")
        self.assertEqual(short["surrogate"], {"path": str(MLP), "kind": "mlp"})
        for report in (named, whole):
            self.assertEqual(report["policy"], short["policy"])
            self.assertEqual(report["context"]["kept_rows"], short["context"]["kept_rows"])
            self.assertEqual(report["answers"][0]["ids"], short["answers"][0]["ids"])
        # A folder's name with what separates parts of a policy.
        odd = self.copy(MLP, "a,b+c")
        report = self.report(*ASK, "--surrogate", odd, *half)
        self.assertEqual(report["context"]["kept_rows"], short["context"]["kept_rows"])

    def test_threshold_as_before(self):
        flags = ["--threshold", "-3.4", "--window", "32", "--dtype", "f32"]
        old = self.report(*ASK, "--surrogate", MLP, *flags)
        new = self.report(*ASK, "--policy", "kvzap", "--surrogate", MLP, *flags)
        self.assertEqual(new["context"]["kept_rows"], old["context"]["kept_rows"])
        self.assertEqual(new["answers"][0]["ids"], old["answers"][0]["ids"])
        self.assertEqual(new["policy"], old["policy"])
        self.assertEqual(old["options"]["threshold"], -3.4)

    def test_seconds(self):
        report = self.report(*ASK, "--policy", "h2o", "--evict-ratio", "0.5")
        context = report["context"]
        self.assertGreater(context["scoring_seconds"], 0)
        self.assertGreater(context["pruning_seconds"], 0)
        self.assertLess(context["scoring_seconds"] + context["pruning_seconds"], context["prefill_seconds"])
        text = self.succeed(*ASK, "--policy", "h2o", "--evict-ratio", "0.5").err.decode()
        self.assertIn("policy   h2o; evict ratio 0.5", text)
        self.assertRegex(text, r"of that scoring \d+\.\d+ s, choosing and evicting \d+\.\d+ s")
        self.assertNotIn("the peak is the full cache", text)

    def test_over_all_layers(self):
        flags = ["--policy", "knorm+global", "--evict-ratio", "0.5"]
        report = self.report(*ASK, *flags, ranks=2)
        self.assertTrue(report["context"]["kv"]["full_at_first"])
        self.assertGreater(len(self.rows(report)), 1)
        self.assertIn("the peak is the full cache", self.succeed(*ASK, *flags).err.decode())

    def test_after_the_question(self):
        flags = ["--policy", "snapkv:window=8", "--keep-tokens", "60", "--dtype", "f32"]
        after = self.report(*ASK, *flags, "--prune-after", "question", "--question", "What is it about?", ranks=2)
        self.assertEqual(self.rows(after), {60})
        question = after["answers"][0]["question_tokens"]
        self.assertEqual(after["context"]["tokens"], TOKENS + question)
        self.assertEqual(after["options"]["prune_after"], "question")
        self.assertFalse(after["context"]["kv"]["full_at_first"])
        for answer in after["answers"]:
            added = max(0, answer["new_tokens"] - 1)
            self.assertEqual(self.rows(after, answer["cache"]), {60 + added})
            self.assertEqual(answer["cache"]["tokens"], TOKENS + answer["question_tokens"] + added)

    def test_threshold_after_the_question(self):
        """Of a policy that looks at the question, by its flag and with +dms alike."""
        flags = [*ASK, "--prune-after", "question", "--dtype", "f32", "--window", "8"]
        plain = self.report(*flags, "--policy", "finch", "--threshold", "0.001")
        named = self.report(*flags, "--policy", "finch+dms:threshold=0.001", ranks=2)
        self.assertEqual(plain["context"]["kept_rows"], named["context"]["kept_rows"])
        self.assertTrue(0 < plain["context"]["evict_ratio"] < 1)

    def test_chunks_before_the_question(self):
        """FINCH's own way. The question's rows leave after each chunk."""
        flags = [*ASK, "--prune-after", "question", "--prefill", "sparse", "--chunk", "16", "--keep-tokens", "60", "-n", "2"]
        reports = [self.report(*flags, "--policy", "finch", ranks=ranks) for ranks in (0, 2)]
        self.assertEqual(reports[0]["context"]["kept_rows"], reports[1]["context"]["kept_rows"])
        for report in reports:
            self.assertEqual(self.rows(report), {60})
            self.assertEqual(report["context"]["tokens"], TOKENS + report["answers"][0]["question_tokens"])
        self.fail_with(kvzap(*flags, "--policy", "finch+critical"), "finch cannot be combined with critical")

    @unittest.skipUnless(HAVE_HDF5, "needs HDF5")
    def test_snapshot_after_the_question(self):
        for count in ("0", "2"):
            file = self.folder / f"{count}.h5"
            self.succeed(*ASK, "--policy", "finch", "--keep-tokens", "60", "--prune-after", "question", "-n", count,
                         "--snapshot", file)
            self.assertGreater(file.stat().st_size, 60 * 2 * HEAD_DIM * 2 * LAYERS * HEADS)

    def test_decode_every(self):
        flags = ["--policy", "knorm", "--evict-ratio", "0.5", "-n", "30", "--ignore-eos", "--decode-every", "5"]
        for ranks in (0, 2):
            report = self.report(*ASK, *flags, "--decode-keep", "50", ranks=ranks)
            self.assertEqual(self.rows(report), {TOKENS // 2})
            for rows in self.rows(report, report["answers"][0]["cache"]):
                self.assertTrue(50 <= rows < 55, rows)
        report = self.report(*ASK, *flags, "--decode-evict-ratio", "0.9")
        end = report["answers"][0]["cache"]
        least = int(end["tokens"] * (1 - 0.9)) - 1
        for rows in self.rows(report, end):
            self.assertTrue(least <= rows < least + 6, rows)


    def test_long_answers(self):
        """Answers far longer than the budget: the rows of a head and the cache's memory stay bounded."""
        budget = ["--keep-tokens", "48", "--decode-every", "16", "--decode-keep", "48", "--ignore-eos"]
        for policy in ("h2o", "tova", "r-kv", "r-kv:mass=0.9", "lazy-eviction", "tri-attention"):
            for ranks in (0, 2):
                with self.subTest(policy=policy, ranks=ranks):
                    peaks = set()
                    for count in (163, 643):
                        (answer,) = self.report(*ASK, "--policy", policy, *budget, "-n", str(count), ranks=ranks)["answers"]
                        self.assertEqual(answer["new_tokens"], count)
                        self.assertEqual(answer["cache"]["tokens"], TOKENS + answer["question_tokens"] + count - 1)
                        self.assertEqual(self.rows(answer, answer["cache"]), {48 + count % 16})
                        peaks.add(answer["cache"]["kv"]["peak_allocated_bytes"])
                    self.assertEqual(len(peaks), 1)

    def test_long_answers_with_a_budget_always(self):
        """--prune always is met with cuts."""
        flags = [*ASK, "--policy", "h2o", "--keep-tokens", "48", "--prune", "always", "-n", "100", "--ignore-eos"]
        self.fail_with(run_command([KVZAP, "run", *flags]), "--keep-tokens is met with --decode-every N", code=2)
        report = self.report(*flags, "--decode-every", "16", "--decode-keep", "48")
        self.assertEqual(self.rows(report, report["answers"][0]["cache"]), {48 + 100 % 16})


class Dump(TestCase):
    def dump(self, *flags, ranks=0, report=True):
        file = self.folder / "dump.safetensors"
        flags = [*flags, "--dump", file]
        said = self.report(*flags, ranks=ranks) if report else self.succeed(*flags, ranks=ranks)
        self.assertEqual([path.name for path in self.folder.iterdir() if path.suffix != ".h5"],
                         ["dump.safetensors"])
        return said, {name: self.unpack(*tensor) for name, tensor in read_safetensors(file).items()}

    def unpack(self, dtype, shape, data):
        values = array.array({"F32": "f", "I32": "i", "U8": "B"}[dtype], data)
        self.assertEqual(len(values), math.prod(shape))
        return dtype, shape, values

    def check(self, report, tensors, suffix="", context_suffix="", answer=0):
        """Shapes and types, and what the report says of the same run."""
        said = report["answers"][answer]
        end = said["cache"]
        for name, dtype, shape in [
            ("context_ids", "I32", [TOKENS]),
            ("question_ids" + suffix, "I32", [said["question_tokens"]]),
            ("scores" + context_suffix, "F32", [LAYERS, HEADS, TOKENS]),
            ("evicted_after_prefill" + context_suffix, "U8", [LAYERS, HEADS, TOKENS]),
            ("evicted_at_end" + suffix, "U8", [LAYERS, HEADS, end["tokens"]]),
            ("generated" + suffix, "I32", [said["new_tokens"]]),
            ("logits" + suffix, "F32", [said["new_tokens"], VOCABULARY]),
        ]:
            self.assertEqual(tensors[name][:2], (dtype, shape), name)
        self.assertEqual(list(tensors["generated" + suffix][2]), said["ids"])
        logits = tensors["logits" + suffix][2]
        for i, token in enumerate(said["ids"]):
            row = logits[i * VOCABULARY : (i + 1) * VOCABULARY]
            self.assertEqual(row[token], max(row))
        self.check_evicted(tensors["evicted_at_end" + suffix], end)

    def check_evicted(self, tensor, cache):
        _, shape, flags = tensor
        tokens = shape[2]
        for layer in range(LAYERS):
            for head in range(HEADS):
                row = flags[(layer * HEADS + head) * tokens : (layer * HEADS + head + 1) * tokens]
                self.assertLessEqual(set(row), {0, 1})
                self.assertEqual(tokens - sum(row), cache["kept_rows"][layer][head])

    def test_surrogate_against_goldens(self):
        golden = {name: self.unpack(*tensor) for name, tensor in
                  read_safetensors(SOURCE / "tests/golden/recall-4m.case0.safetensors").items()}
        run = "kvzap-linear.tau-3.4.w128.decode"
        flags = [*ASK, "--surrogate", LINEAR, "--threshold", "-3.4", "--prune", "always", "--dtype", "f32"]
        for ranks in (0, 1, 2, 3):
            report, tensors = self.dump(*flags, ranks=ranks)
            self.check(report, tensors)
            self.check_evicted(tensors["evicted_after_prefill"], report["context"])
            self.assertEqual(tensors["context_ids"], golden["context_ids"])
            for name in ("evicted_after_prefill", "evicted_at_end", "generated"):
                self.assertEqual(tensors[name], golden[f"{run}.{name}"], (ranks, name))
            for name, key in (("scores", "kvzap-linear.scores"), ("logits", f"{run}.logits")):
                _, shape, values = tensors[name]
                self.assertEqual(shape, golden[key][1])
                for found, expected in zip(values, golden[key][2]):
                    self.assertAlmostEqual(found, expected, delta=2e-3)

    def test_full_cache(self):
        report, tensors = self.dump(*ASK, ranks=2)
        self.check(report, tensors)
        self.assertTrue(all(map(math.isnan, tensors["scores"][2])))
        self.assertEqual(sum(tensors["evicted_at_end"][2]), 0)

    def test_policies(self):
        """What stays has the largest scores."""
        for policy in ("knorm", "snapkv", "h2o", "keydiff", "tova"):
            outcomes = []
            for ranks in (0, 2, 3):
                with self.subTest(policy=policy, ranks=ranks):
                    report, tensors = self.dump(*ASK, "--policy", policy, "--evict-ratio", "0.75", "--dtype", "f32",
                                                ranks=ranks)
                    self.check(report, tensors)
                    self.check_evicted(tensors["evicted_after_prefill"], report["context"])
                    kept = int(TOKENS * (1 - 0.75))
                    scores, evicted = tensors["scores"][2], tensors["evicted_after_prefill"][2]
                    self.assertFalse(any(map(math.isnan, scores)))
                    for begin in range(0, len(scores), TOKENS):
                        gone = [scores[i] for i in range(begin, begin + TOKENS) if evicted[i]]
                        stays = [scores[i] for i in range(begin, begin + TOKENS) if not evicted[i]]
                        self.assertEqual(len(stays), kept)
                        self.assertGreaterEqual(min(stays), max(gone))
                    outcomes.append(tensors["generated"])
            self.assertEqual(outcomes, outcomes[:1] * 3)

    def test_several_questions(self):
        flags = [*ASK, "--question", "What is the text about?", "--policy", "snapkv:window=8", "--evict-ratio", "0.5"]
        report, tensors = self.dump(*flags, ranks=2)
        self.assertEqual(set(tensors), {"context_ids", "scores", "evicted_after_prefill"} | {
            f"{name}.{i}" for name in ("question_ids", "evicted_at_end", "generated", "logits") for i in (1, 2)})
        for i in range(2):
            self.check(report, tensors, f".{i + 1}", answer=i)
        report, tensors = self.dump(*flags, "--prune-after", "question", ranks=2)
        for i in range(2):
            self.check(report, tensors, f".{i + 1}", f".{i + 1}", answer=i)
        self.assertNotIn("scores", tensors)
        self.assertNotEqual(tensors["scores.1"], tensors["scores.2"])

    def test_closed_up_positions(self):
        _, tensors = self.dump(*ASK, "--policy", "knorm+rerotate", "--evict-ratio", "0.5")
        self.assertEqual(set(tensors), {"context_ids", "question_ids", "scores", "generated", "logits"})

    def test_merged_values(self):
        flags = [*ASK, "--dtype", "f32", "-n", "4", "--evict-ratio", "0.75", "--policy"]
        _, plain = self.dump(*flags, "knorm")
        outcomes = []
        for ranks in (0, 2):
            _, tensors = self.dump(*flags, "knorm+merge:similarity=0.1,fraction=0.9", ranks=ranks)
            self.assertEqual(tensors["evicted_after_prefill"], plain["evicted_after_prefill"])
            self.assertNotEqual(tensors["logits"], plain["logits"])
            outcomes.append(tensors["generated"])
        self.assertEqual(*outcomes)

    def test_cache_merging(self):
        flags = [*ASK, "--dtype", "f32", "-n", "24", "--evict-ratio", "0", "--decode-every", "4", "--decode-keep", "40",
                 "--policy"]
        _, plain = self.dump(*flags, "tova")
        outcomes = []
        for ranks in (0, 2):
            _, tensors = self.dump(*flags, "tova+cam:window=8", ranks=ranks)
            self.assertEqual(tensors["evicted_after_prefill"], plain["evicted_after_prefill"])
            self.assertNotEqual(tensors["logits"], plain["logits"])
            outcomes.append(tensors["generated"])
        self.assertEqual(*outcomes)

    def test_nothing_generated(self):
        _, tensors = self.dump(*ASK, "-n", "0", report=False)
        self.assertEqual(tensors["generated"][1], [0])
        self.assertEqual(tensors["logits"][1], [0, 0])

    def test_old_dump_survives_a_failure(self):
        model = self.copy(MODEL, "model")
        (model / "model.safetensors").write_bytes(b"bad")
        old = self.folder / "dump"
        old.write_text("old")
        for ranks in (0, 2):
            result = kvzap("-m", model, "-p", "one", "--dump", old, ranks=ranks)
            self.fail_with(result, "model.safetensors")
        self.assertEqual(old.read_text(), "old")
        for target in (self.folder / "none" / "x", self.folder, old / "x"):
            for ranks in (0, 2):
                result = kvzap("-m", model, "-p", "one", "--dump", target, ranks=ranks)
                self.fail_with(result, f"--dump {target}", code=1)
                self.assertNotIn("model.safetensors", result.errors[0])
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["dump", "model"])


if __name__ == "__main__":
    unittest.main()
