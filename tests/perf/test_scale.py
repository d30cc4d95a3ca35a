"""perf/scale: kept rows of models that were not run, the cost model, and errors."""
import copy
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "perf" / "scaling"))

if sys.version_info >= (3, 11):  # tomllib
    import cost
    import fit
    import measure
    import rows
    import shapes
    import splits

NEEDS = unittest.skipIf(sys.version_info < (3, 11), "tomllib needs Python 3.11")
PROGRAM = os.environ.get("KVZAP_REPLAY_PLACEMENT", "")


def even_layers(shape, ranks, rows_of_layer):
    return [cost.Layer(rows_of_layer, rows_of_layer / ranks) for _ in range(shape.full_layers)]


@NEEDS
class CostModel(unittest.TestCase):
    def setUp(self):
        self.machines = cost.load_machines()
        self.shape = shapes.load("Qwen3-8B")

    def parts(self, machine, ranks, tokens=1, kept=8 * 32768):
        return cost.Step(self.shape, self.machines[machine], ranks, tokens).parts(
            even_layers(self.shape, ranks, kept * tokens))

    def test_one_rank_reads_weights_and_rows_once(self):
        machine = self.machines["socket"]
        parts = self.parts("socket", 1)
        weights = 2 * fit.read_weights(self.shape)
        self.assertAlmostEqual(weights, 15.1e9, delta=0.2e9)  # 8.2e9 weights without the embedding, in bf16
        self.assertAlmostEqual(parts["weights"], weights / machine["memory"], delta=1e-9)
        row_bytes = 36 * 8 * 32768 * 2 * 128 * 2
        self.assertAlmostEqual(parts["rows"], row_bytes / (machine["memory"] * machine["attention"]), delta=1e-9)
        self.assertEqual(parts["sums"] + parts["exchanges"], 0)
        self.assertAlmostEqual(parts["rest"], machine["rest_step"] + 36 * (
            machine["rest_layer"] + machine["rest_token"] * 4096), delta=1e-12)

    def test_more_ranks_take_parts_of_the_work(self):
        for machine in ("socket", "h100"):
            before = self.parts(machine, 1)
            for ranks in (2, 4, 8, 16, 64, 256, 1024):
                parts = self.parts(machine, ranks)
                self.assertLess(parts["weights"], before["weights"])
                self.assertLess(parts["rows"], before["rows"])
                self.assertGreaterEqual(parts["sums"], before["sums"])
                before = parts

    def test_times_grow_with_sequences_and_rows(self):
        for ranks in (1, 8, 128):
            last = {part: 0 for part in cost.PARTS}
            for tokens in (1, 4, 16, 64, 256):
                parts = self.parts("h100", ranks, tokens)
                for part in cost.PARTS:
                    self.assertGreaterEqual(parts[part], last[part])
                last = parts
            self.assertLess(self.parts("h100", ranks, kept=1000)["rows"], self.parts("h100", ranks, kept=2000)["rows"])

    def test_shared_layers_exchange(self):
        step = cost.Step(self.shape, self.machines["h100"], 16, 1)
        plain = even_layers(self.shape, 16, 100000)
        shared = [cost.Layer(x.total, x.largest, True, 600, 600, 4) for x in plain]
        self.assertEqual(step.parts(plain)["exchanges"], 0)
        self.assertEqual((step.calls(plain), step.calls(shared)), (2 * 36 + 3, 4 * 36 + 3))
        self.assertGreater(step.parts(shared)["exchanges"], 36 * self.machines["h100"]["network"]["alpha"])
        with self.assertRaisesRegex(ValueError, "Qwen3-8B: 1 layers of rows; expected 36"):
            step.parts(plain[:1])

    def test_sums_are_log_trees_or_halving(self):
        network = cost.Network(self.machines["h100"], 64)
        self.assertAlmostEqual(network.latency(), 3 * 4e-6 + 3 * 8e-6)
        self.assertAlmostEqual(network.sum(8), network.latency(), delta=1e-9)
        large = 1e9
        bound = 2 * (large * 7 / 8 / 360e9 + large / 8 * 7 / 8 / 45e9)
        self.assertAlmostEqual(network.sum(large), 2 * network.latency() + bound, delta=1e-6)

    def test_experts(self):
        shape = shapes.load("Qwen3-235B-A22B")
        self.assertAlmostEqual(shape.weight_bytes(), 470e9, delta=5e9)
        self.assertAlmostEqual(shape.touched_experts(1), 8)
        self.assertLess(shape.touched_experts(256), 128)
        self.assertGreater(shape.touched_experts(256), 127)
        oss = shapes.load("gpt-oss-120b")
        self.assertEqual(oss.full_layers, 18)
        self.assertAlmostEqual(oss.weight_bytes(), 65e9, delta=4e9)

    def test_constants_are_fitted(self):
        """The fit returns the constants of steps that the model itself has computed."""
        machine = copy.deepcopy(self.machines["zen3"])
        machine.update(memory=15e9, memory_all=25e9, flops=40e9, flops_all=70e9,
                       row_seconds=[[2, 45e-9], [8, 90e-9], [16, 120e-9]])
        machine["node"]["switch"] = 300e-6
        measured = []
        for case in measure.CASES:
            if case["role"] == "fit":
                layers = [cost.Layer(sum(layer), sum(layer) / case["ranks"])
                          for layer in map(lambda one: [x * case["batch"] for x in one], measure.bench_rows(case)[0])]
                step = cost.Step(fit.shape_of(case), machine, case["ranks"], case["batch"])
                measured.append({**case, "seconds": sum(step.parts(layers).values())})
        found = fit.fitted(self.machines["zen3"], measured)
        for name, value in fit.constants(machine).items():
            self.assertAlmostEqual(fit.constants(found)[name] / value, 1, delta=0.03, msg=name)


@NEEDS
class KeptRows(unittest.TestCase):
    def setUp(self):
        self.recordings = rows.load()

    def test_spread_over_heads_stays(self):
        recording = self.recordings["smollm2"]
        for layers, heads in ((36, 8), (94, 4)):
            kept = rows.kept(recording, "--threshold auto", 32768, layers, heads, 5)
            self.assertEqual((len(kept), len(kept[0]), len(kept[0][0])), (5, layers, heads))
            for sequence in kept:
                for layer in sequence:
                    self.assertTrue(all(128 <= r <= 32768 for r in layer))
        prompt = recording["prompts"][0]
        shares = [x for layer in rows.shares(prompt, 128) for x in layer]
        mapped = [x for layer in rows.kept(recording, "--threshold auto", 1_000_128, 30, 3, 1) for one in layer
                  for x in one]
        self.assertAlmostEqual(sum(mapped) / len(mapped) / 1e6, sum(shares) / len(shares), delta=0.02)
        self.assertEqual([rows.slice_mean([1, 2, 6], part, 2) for part in (0, 1)], [2 / 1.5, 7 / 1.5])

    def test_errors(self):
        with self.assertRaisesRegex(ValueError, "no recorded prompts with 'x'"):
            rows.kept(self.recordings["demo"], "x", 100, 2, 2, 1)


@NEEDS
class Command(unittest.TestCase):
    def run_scale(self, *arguments):
        return subprocess.run([sys.executable, str(ROOT / "perf" / "scale"), *map(str, arguments)],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test_errors_are_one_line(self):
        with tempfile.TemporaryDirectory() as folder:
            bad = pathlib.Path(folder) / "machines.toml"
            bad.write_text((ROOT / "perf/scaling/machines.toml").read_text().replace("flops = 700e12", "flops = -1"))
            for arguments, text in [
                (["plan", "--models", "none"], "no model 'none'"),
                (["plan", "--program", "/none"], "/none: No such file or directory; build it"),
                (["plan", "--amount", "x"], "no recorded prompts with 'x'"),
                (["plan", "--recording", "x"], "no recording 'x'"),
                (["plan", "--constants", bad], "[h100] flops is -1; expected a positive number"),
                (["check", "--measured", "/none"], "/none"),
            ]:
                run = self.run_scale(*arguments)
                self.assertEqual(run.returncode, 1, arguments)
                self.assertIn(text, run.stderr)
                self.assertNotIn("Traceback", run.stderr)
                self.assertEqual(run.stderr.splitlines()[-1][:12], "perf/scale: ")
        run = self.run_scale("plan", "--ranks", "0")
        self.assertEqual(run.returncode, 2)
        self.assertIn("expected numbers of at least 1", run.stderr)

    @unittest.skipUnless(PROGRAM, "needs replay_placement: KVZAP_ENABLE_PERF")
    def test_placement_keeps_rows(self):
        shape = shapes.load("Qwen3-8B")
        kept = rows.kept(rows.load()["smollm2"], "--threshold auto", 16384, 36, 8, 4)
        for ranks, layers in splits.Replayer(PROGRAM)(shape, kept, [1, 3, 8, 20, 1024]).items():
            for i, layer in enumerate(layers):
                self.assertEqual(layer["rows"], sum(sum(sequence[i]) for sequence in kept))
                self.assertLessEqual(layer["after"], layer["before"])
                self.assertGreaterEqual(layer["after"] * ranks, layer["rows"])
                self.assertEqual(layer["is_shared"], ranks > 8 or layer["moved"] > 0)
        machine = cost.load_machines()["zen3"]
        for case, _, error, calls in fit.checked(machine, json.loads((ROOT / "perf/scaling/measured.json").read_text()), PROGRAM):
            self.assertEqual(calls, case["calls"], case)
            self.assertLess(abs(error), 0.5, case)
        run = subprocess.run([PROGRAM], input=json.dumps({"rows": []}), stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
        self.assertEqual(run.returncode, 1)
        self.assertEqual(len(run.stderr.splitlines()), 1)


if __name__ == "__main__":
    unittest.main()
