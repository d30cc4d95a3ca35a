"""A real model, SmolLM2-135M-Instruct from its GGUF file. Skipped unless scripts/real-model has brought the file."""
import json
import os
import pathlib
import unittest

from harness import SOURCE, TestCase

GOLDEN = json.loads((SOURCE / "tests/golden/smollm2-135m-instruct.json").read_text())
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
FILE = CACHE / "kvzap" / GOLDEN["file"]


@unittest.skipUnless(FILE.is_file(), f"there is no {FILE}: scripts/real-model --fetch downloads it (98 MB)")
class RealModel(TestCase):
    def ask(self, case, *flags, ranks=0, weights="unpacked"):
        prompt = self.folder / "prompt.txt"
        prompt.write_text(case["prompt"])
        return self.report("-m", FILE, "--raw", "-f", prompt, "--dtype", "f32", "--weights", weights, "-n",
                           len(case["answer"]), "--greedy-plain", "--json-token-ids", *flags, ranks=ranks)

    def test_greedy_answers_equal_the_reference(self):
        # compare_gguf.py: numpy in float32, weights as the package gguf dequantises them.
        for case in GOLDEN["cases"]:
            with self.subTest(tokens=len(case["ids"])):
                report = self.ask(case)
                self.assertEqual(report["context"]["ids"], case["ids"])
                self.assertEqual(report["answers"][0]["ids"], case["answer"])

    def test_weights_in_blocks(self):
        """Activations are rounded to bytes: answers stay near the reference, in a third of the memory."""
        equal = total = 0
        for case in GOLDEN["cases"]:
            report = self.ask(case, weights="stored")
            pairs = list(zip(report["answers"][0]["ids"], case["answer"]))
            equal += next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
            total += len(pairs)
            self.assertLess(report["memory"]["weight_bytes"], 1.01 * FILE.stat().st_size)
        self.assertGreater(equal, total / 2)

    def test_ranks_and_eviction(self):
        case = GOLDEN["cases"][-1]
        self.assertEqual(self.ask(case, ranks=3)["answers"][0]["ids"], case["answer"])
        evict = ["--policy", "expected-attention", "--evict-ratio", "0.5"]
        one, three = (self.ask(case, *evict, ranks=ranks) for ranks in (0, 3))
        self.assertEqual(one["answers"][0]["ids"], three["answers"][0]["ids"])
        self.assertAlmostEqual(one["context"]["kv"]["live_bytes"] / one["context"]["kv"]["full_bytes"], 0.5, delta=0.01)


if __name__ == "__main__":
    unittest.main()
