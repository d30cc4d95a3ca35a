"""--policy kvzip and kvzip-plus: what the repeat of a context scores, keeps and refuses."""
import json
import struct
import unittest

from harness import (CASES, MODEL, SOURCE, TestCase, kvzap, read_safetensors)

CASE = CASES[0]
TOKENS = CASE["n_context"]
LAYERS, HEADS = 6, 4
TEXT = ["-p", CASE["context"]]
HALF = ["--evict-ratio", "0.5"]
GOLDEN = SOURCE / "tests" / "golden" / "policies" / "recall-4m.case0.safetensors"


def numbers(tensor):
    """Of a tensor as read_safetensors has it."""
    dtype, _, data = tensor
    return struct.unpack(f"<{len(data) // 4}f", data) if dtype == "F32" else list(data)


class Oracle(TestCase):
    def dump(self, *flags, ranks=0):
        file, json_file = self.folder / "dump", self.folder / "report"
        self.succeed("-m", MODEL, *flags, "--dump", file, "--json", json_file, "-n", "2", "--dtype", "f32",
                     ranks=ranks)
        tensors = read_safetensors(file)
        return json.loads(json_file.read_text()), tensors

    def check_scores(self, tensors, golden):
        """All but the first 4 positions of each head, which get the largest plus 1."""
        expected = numbers(read_safetensors(GOLDEN)[golden])
        found = numbers(tensors["scores"])
        self.assertEqual(len(found), len(expected))
        for ours, theirs in zip(found, expected):
            self.assertLessEqual(abs(ours - theirs), 1e-3 * theirs)

    def test_scores_of_kvpress_and_counts(self):
        for ranks in (0, 3, HEADS + 2):
            for policy, flags, golden in (
                ("kvzip", [], "kvzip.ratio0.5.scores"),
                ("kvzip-plus", [], "kvzip-plus.ratio0.5.scores"),
                ("kvzip", ["--layerwise"], "kvzip.ratio0.5.scores"),
            ):
                with self.subTest(policy=policy, flags=flags, ranks=ranks):
                    report, tensors = self.dump(*TEXT, "--policy", policy, *flags, "--evict-ratio", "0.55",
                                                ranks=ranks)
                    self.check_scores(tensors, golden)
                    evicted = numbers(tensors["evicted_after_prefill"])
                    of_layer = HEADS * TOKENS
                    if flags:
                        for begin in range(0, len(evicted), of_layer):
                            self.assertEqual(sum(evicted[begin:begin + of_layer]), int(of_layer * 0.55))
                        self.assertEqual(report["policy"], "kvzip:layerwise=on")
                    else:
                        self.assertEqual(sum(evicted), int(LAYERS * of_layer * 0.55))
                        self.assertGreater(len({tuple(rows) for rows in report["context"]["kept_rows"]}), 1)
                    scores = numbers(tensors["scores"])
                    if not flags:
                        gone = [score for score, is_gone in zip(scores, evicted) if is_gone]
                        stays = [score for score, is_gone in zip(scores, evicted) if not is_gone]
                        self.assertGreaterEqual(min(stays), max(gone))
                    for begin in range(0, len(evicted), TOKENS):
                        self.assertEqual(sum(evicted[begin:begin + 4]), 0)

    def test_report(self):
        report = self.report("-m", MODEL, *TEXT, "--policy", "kvzip-plus:chunk=64", *HALF, "-n", "3", ranks=2)
        context = report["context"]
        self.assertTrue(context["kv"]["full_at_first"])
        self.assertEqual(context["tokens"], TOKENS)
        self.assertGreater(context["scoring_seconds"], 0)
        self.assertGreater(context["prefill_seconds"], context["scoring_seconds"])
        self.assertAlmostEqual(context["evict_ratio"], 0.5, delta=1e-3)
        for amount in (["--keep-tokens", "40"], ["--kv-budget", "200k"]):
            for layerwise in ([], ["--layerwise"]):
                report = self.report("-m", MODEL, *TEXT, "--policy", "kvzip", *amount, *layerwise, "-n", "1")
                if amount[0] == "--keep-tokens":
                    self.assertEqual(sum(map(sum, report["context"]["kept_rows"])), 40 * LAYERS * HEADS)
                else:
                    self.assertLessEqual(report["context"]["kv"]["live_bytes"], 200e3)

    def test_composite_tokens(self):
        kept = {}
        for ranks in (0, 2, 3):
            for policy in ("kvcompose", "kvcompose:structured=off"):
                report = self.report("-m", MODEL, *TEXT, "--policy", policy, *HALF, "-n", "3", ranks=ranks)
                context = report["context"]
                self.assertTrue(context["kv"]["full_at_first"])
                self.assertAlmostEqual(context["evict_ratio"], 0.5, delta=1e-3)
                rows = context["kept_rows"]
                if policy == "kvcompose":
                    self.assertTrue(all(len(set(heads)) == 1 and heads[0] <= rows[0][0] for heads in rows), rows)
                    self.assertEqual(sum(heads[0] for heads in rows), int(LAYERS * TOKENS * 0.5))
                # Sums over ranks round otherwise, and may exchange two rows at the cut.
                for one, other in zip(rows, kept.setdefault(policy, rows)):
                    self.assertTrue(all(abs(a - b) <= 1 for a, b in zip(one, other)), (policy, ranks))
        report = self.report("-m", MODEL, *TEXT, "--policy", "kvcompose:chunk=50", "--keep-tokens", "40", "-n", "1")
        self.assertEqual(sum(map(sum, report["context"]["kept_rows"])), 40 * LAYERS * HEADS)

    def test_plan_and_limits(self):
        plan = ["-m", MODEL, "-c", "1000", "--dry-run", *HALF, "--policy"]
        for policy, tokens in (("kvzip", 1000), ("kvzip-plus:chunk=64", 64), ("kvcompose", 1000), ("kvcompose:chunk=64", 64)):
            self.assertIn(f"up to {tokens} more tokens", self.succeed(*plan, policy).text)
        self.assertNotIn("repeated", self.succeed(*plan, "knorm+global").text)
        for most, warns in ((TOKENS + 20, True), (4096, False)):
            model = self.copy(MODEL, f"model{most}", max_position_embeddings=most)
            result = self.succeed("-m", model, *TEXT, "--policy", "kvzip", *HALF, "-n", "1", "--question", "?")
            self.assertEqual("the repeat of the context ends at position" in result.err.decode(), warns)

    def test_ranks_with_unequal_parts(self):
        rows = [[1000 if head == layer % HEADS else 1 for head in range(HEADS)] for layer in range(LAYERS)]
        placement = self.folder / "placement"
        placement.write_text(json.dumps({"context": {"kept_rows": rows}}))
        for policy in ("kvzip", "kvzip-plus"):
            _, tensors = self.dump(*TEXT, "--policy", policy, *HALF, "--placement", placement, ranks=3)
            self.check_scores(tensors, f"{policy}.ratio0.5.scores")

    def test_answers_several_questions_alike(self):
        ask = ["-m", MODEL, *TEXT, "--policy", "kvzip", *HALF]
        question = ["--question", CASE["question"]]
        one = self.report(*ask, *question)["answers"]
        two = self.report(*ask, *question, *question, ranks=2)["answers"]
        self.assertEqual([answer["text"] for answer in two], [one[0]["text"]] * 2)

    def test_token_ids_that_begin_as_the_template(self):
        _, tensors = self.dump(*TEXT, "--policy", "kvzip", *HALF)
        data = tensors["context_ids"][2]
        ids = struct.unpack(f"<{len(data) // 4}i", data)
        _, again = self.dump("--token-ids", "-p", " ".join(map(str, ids)), "--policy", "kvzip", *HALF)
        self.assertEqual(again["scores"], tensors["scores"])
        # Plain text is repeated from its first token on.
        _, plain = self.dump("--token-ids", "-p", " ".join(map(str, ids[40:])), "--policy", "kvzip:sink=0", *HALF)
        self.assertGreater(min(numbers(plain["scores"])), 0)
        _, raw = self.dump("--raw", *TEXT, "--policy", "kvzip:sink=0", *HALF)
        self.assertGreater(min(numbers(raw["scores"])), 0)

    def test_errors(self):
        model = self.copy(MODEL, "model")
        (model / "model.safetensors").write_bytes(b"bad")
        kvzip = ["--policy", "kvzip"]
        for flags, *parts in [
            (kvzip, "--policy kvzip needs one of"),
            ([*kvzip, "--threshold", "0.1"], "--threshold cannot be combined with --policy kvzip", "--evict-ratio"),
            (["--policy", "kvzip-plus", "--threshold", "0.1"],
             "--threshold cannot be combined with --policy kvzip-plus"),
            ([*kvzip, *HALF, "--prune-after", "question"],
             "--prune-after question cannot be combined with --policy kvzip"),
            ([*kvzip, *HALF, "--prefill", "sparse"], "--prefill sparse cannot be combined with --policy kvzip"),
            ([*kvzip, *HALF, "--prune", "always"], "--prune always cannot be combined with --policy kvzip"),
            ([*kvzip, *HALF, "--decode-every", "8", "--decode-keep", "9"],
             "--decode-every cannot be combined with --policy kvzip"),
            (["--policy", "kvzip+ada", *HALF], "it cannot have the modifier ada"),
            (["--policy", "kvcompose+ada", *HALF], "it cannot have the modifier ada"),
            (["--policy", "kvcompose", "--threshold", "0.1"],
             "--threshold cannot be combined with --policy kvcompose"),
            (["--policy", "kvzip+critical", *HALF], "it cannot have the modifier critical"),
            (["--policy", "kvzip+dms", "--threshold", "0.1"], "--threshold cannot be combined with --policy kvzip"),
            (["--policy", "kvzip:chunk=0", *HALF], "chunk", "from 1"),
            (["--policy", "snapkv", *HALF, "--layerwise"], "--layerwise cannot be combined with --policy snapkv",
             "fastkvzip, kvzip, kvzip-plus"),
            (["--layerwise"], "--layerwise has no effect without --policy"),
            (["--policy", "kvzip:layerwise=off", *HALF, "--layerwise"], "give one of them"),
        ]:
            with self.subTest(flags=flags):
                result = kvzap("-m", model, "-p", "one two three", "--question", "four", *flags)
                self.assertNotIn("model.safetensors", str(result))
                self.fail_with(result, *parts)
        for ranks in (0, 2):
            (model / "tokenizer.json").unlink(missing_ok=True)
            result = kvzap("-m", model, "--token-ids", "-p", "1 2 3", *kvzip, *HALF, ranks=ranks)
            self.assertNotIn("model.safetensors", str(result))
            self.fail_with(result, "asked to repeat the context in words", "tokenizer.json", code=1)
        # No words ask for kvcompose's second look.
        bare = self.copy(MODEL, "bare")
        (bare / "tokenizer.json").unlink()
        self.succeed("-m", bare, "--token-ids", "-p", "5 6 7 8", "--policy", "kvcompose", *HALF, "-n", "1")
        ids = self.token_ids_of_the_prefix()
        for ranks in (0, 2):
            result = kvzap("-m", MODEL, "--token-ids", "-p", ids, *kvzip, *HALF, ranks=ranks)
            self.fail_with(result, "there is nothing to repeat", code=1)

    def token_ids_of_the_prefix(self):
        _, tensors = self.dump("-p", "x", "--policy", "knorm", *HALF)
        data = tensors["context_ids"][2]
        ids = struct.unpack(f"<{len(data) // 4}i", data)
        return " ".join(map(str, ids[:-1]))


if __name__ == "__main__":
    unittest.main()
