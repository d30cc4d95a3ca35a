"""--lookup: the same answers and evictions as without it, what is reported, and where it has no effect."""
import json
import random

from harness import CASES, LINEAR, MODEL, SOURCE, TestCase, kvzap

FAMILIES = SOURCE / "tests/golden/families"


def some_text(words, count, seed):
    """Token ids of which many n-grams occur again, and few go on alike."""
    numbers = random.Random(seed)
    ids = []
    while len(ids) < count:
        if len(ids) > 12 and numbers.random() < 0.7:
            first = numbers.randrange(len(ids) - 6)
            ids += ids[first:first + 6]
        else:
            ids += [numbers.randrange(3, words) for _ in range(6)]
    return " ".join(map(str, ids[:count]))


class LookupCase(TestCase):
    def compare(self, *arguments, lookup=6, ranks=0):
        """The answers with guesses, which are those without, and the number of their guesses."""
        plain, report = (json.loads(self.succeed(*arguments, *flags, "--json", "-", "-q", ranks=ranks).out)
                         for flags in ([], ["--lookup", lookup]))
        guessed = accepted = 0
        for answer, expected in zip(report["answers"], plain["answers"], strict=True):
            self.assertEqual(answer["ids"], expected["ids"])
            self.assertEqual(answer["stop_reason"], expected["stop_reason"])
            self.assertEqual(answer["cache"]["evict_ratio"], expected["cache"]["evict_ratio"])
            self.assertEqual(answer["cache"]["kept_rows"], expected["cache"]["kept_rows"])
            self.assertNotIn("drafted_tokens", expected)
            self.assertLessEqual(answer["accepted_tokens"], answer["drafted_tokens"])
            guessed += answer["drafted_tokens"]
            accepted += answer["accepted_tokens"]
        return report, guessed, accepted


class Answers(LookupCase):
    def test_of_the_demo_model(self):
        case = CASES[0]
        ask = ["-m", MODEL, "-p", case["context"], "--question", case["question"], "-n", 40, "--ignore-eos",
               "--dtype", "f32"]
        for flags in ([], ["--surrogate", LINEAR, "--threshold", -4],
                      ["--surrogate", LINEAR, "--threshold", -4, "--prune", "always", "--window", 32],
                      ["--temp", 0.8, "--seed", 4], ["--kv-type", "q8"]):
            for ranks in (0, 2):
                with self.subTest(flags=flags, ranks=ranks):
                    report, guessed, _ = self.compare(*ask, *flags, ranks=ranks)
                    self.assertGreater(guessed, 0)
                    self.assertEqual(report["options"]["lookup"], 6)

    def test_where_it_has_no_effect(self):
        ask = ["-p", some_text(90, 40, 1), "--token-ids", "-n", 8]
        for model, flags, reason in (
                (FAMILIES / "qwen3_next", [], "layers of the model have states"),
                (MODEL, ["--policy", "tova", "--evict-ratio", 0.5, "--decode-every", 4, "--decode-evict-ratio", 0.5],
                 "rows are cut while the answer is generated"),
                (MODEL, ["--policy", "knorm", "--threshold", -5, "--prune", "always"], "policy knorm judges")):
            with self.subTest(reason=reason):
                result = kvzap("-m", model, *ask, *flags, "--lookup", 8)
                self.assertEqual(result.code, 0, result)
                self.assertIn("kvzap: warning: --lookup has no effect: " + reason, result.err.decode())

    def test_values(self):
        ask = ["-m", MODEL, "-p", "a"]
        self.fail_with(kvzap(*ask, "--lookup", 33), "--lookup is 33; expected 0 to 32", code=2)
        self.fail_with(kvzap(*ask, "--lookup", -1), "--lookup is -1", code=2)
        self.fail_with(kvzap(*ask, "--lookup", 3, "--dump", self.folder / "dump"), "--lookup cannot be combined with --dump",
                       code=2)


class Families(LookupCase):
    """Windows, chunks, latent rows, shared rows, experts, sinks, several streams."""

    NAMES = ["cohere2", "deepseek_v2", "gemma3_text", "gemma3n", "gpt_oss", "llama4_text", "mimo_v2_flash", "opt", "qwen3_moe"]

    def test_answers(self):
        guessed = accepted = 0
        for name in self.NAMES:
            folder = FAMILIES / name
            threshold = json.loads((folder / "golden.json").read_text())["threshold"]
            always = ["--surrogate", folder / "kvzap-linear", "--threshold", threshold, "--prune", "always"]
            for flags in ([], always):
                if flags and name == "gemma3n":
                    continue  # its layers share rows
                with self.subTest(model=name, flags=flags):
                    counts = self.compare("-m", folder, "--token-ids", "-p", some_text(200, 40, 2), "--question",
                                          some_text(200, 9, 3), "-n", 40, "--ignore-eos", "--dtype", "f32", "--window", 16, *flags)
                    guessed += counts[1]
                    accepted += counts[2]
        self.assertGreater(accepted, 0)
        self.assertGreater(guessed, accepted)
