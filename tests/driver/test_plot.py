"""kvzap-plot on what the program writes, and on what it does not."""
import importlib.util
import json
import sys
import unittest

from harness import HAVE_HDF5, KVZAP, LINEAR, MODEL, SOURCE, TestCase, kvzap, run_command

PLOT = SOURCE / "drivers" / "kvzap_plot.py"
HAVE_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
HAVE_H5PY = importlib.util.find_spec("h5py") is not None


def plot(*arguments):
    return run_command([sys.executable, "-B", PLOT, *arguments])


@unittest.skipUnless(HAVE_MATPLOTLIB, "needs matplotlib")
class Plots(TestCase):
    def expect_image(self, name, *arguments):
        image = self.folder / name
        result = plot(*arguments, "-o", image)
        self.assertEqual((result.code, result.out, result.err), (0, b"", b""), result)
        content = image.read_bytes()
        self.assertEqual([p.name for p in self.folder.glob("*.tmp-*")], [])
        return content

    def expect_error(self, *parts, arguments):
        result = plot(*arguments, "-o", self.folder / "never.svg")
        self.assertEqual((result.code, result.out), (1, b""), result)
        lines = result.err.decode().splitlines()
        self.assertEqual(len(lines), 1, result)
        for part in ("kvzap-plot: error:", *parts):
            self.assertIn(part, lines[0])
        self.assertEqual(list(self.folder.glob("never*")), [])

    def run_model(self, *arguments):
        prompt = self.folder / "prompt.txt"
        prompt.write_text("The key of the red door is 4711. " * 30)
        result = kvzap("-m", MODEL, "--surrogate", LINEAR, "--threshold", "-3.4", "--window", "32", "-f", prompt,
                       "-n", "4", *arguments)
        self.assertEqual(result.code, 0, result)

    def test_kept_rows(self):
        report = self.folder / "run.json"
        self.run_model("--json", report)
        svg = self.expect_image("kept.svg", "kept", report)
        self.assertIn(b"<svg", svg)
        self.assertEqual(svg, self.expect_image("again.svg", "kept", report))
        self.assertTrue(self.expect_image("end.png", "kept", report, report, "--when", "end").startswith(b"\x89PNG"))

    @unittest.skipUnless(HAVE_HDF5 and HAVE_H5PY, "needs HDF5 and h5py")
    def test_positions(self):
        snapshot = self.folder / "cache.h5"
        self.run_model("--snapshot", snapshot)
        self.assertIn(b"<svg", self.expect_image("positions.svg", "positions", snapshot))
        # What is drawn: the window in full, and as many pairs as the file has.
        spec = importlib.util.spec_from_file_location("kvzap_plot", PLOT)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        shares, tokens = module.read_positions(snapshot, 10**9)
        self.assertTrue((shares[:, tokens - 32:] == 1).all())
        import h5py

        with h5py.File(snapshot) as file:
            heads = int(file.attrs["n_kv_heads"])
            for layer, row in enumerate(shares):
                self.assertAlmostEqual(row.sum() * heads, len(file[f"layers/{layer}/positions"]))
        self.expect_error("cut.h5", arguments=["positions", self.cut(snapshot, "cut.h5")])

    def cut(self, file, name):
        part = self.folder / name
        part.write_bytes(file.read_bytes()[:700])
        return part

    def test_bench(self):
        result = run_command([KVZAP, "bench", "-m", MODEL, "-p", "16", "-n", "2", "-d", "0,40", "--evict-ratio",
                              "0,0.5", "-r", "2", "-o", "json"])
        self.assertEqual(result.code, 0, result)
        report = self.folder / "bench.json"
        report.write_bytes(result.out)
        self.assertIn(b"<svg", self.expect_image("bench.svg", "bench", report))
        self.expect_error("bench.json", '"kvzap.run"', '"kvzap.bench"', arguments=["kept", report])

    TRAINING = {"format": "kvzap.training", "format_version": 1, "layers": [
        {"r2": [0.5, None], "sample": {"oracle": [[-4, -3], [-2, -1.5]], "predicted": [[-4.1, -3], [-2, -1]]}},
        {"r2": [0.7, 0.25], "sample": {"oracle": [], "predicted": []}},
        {"r2": [0.7, 0.25], "sample": {"oracle": [[-1, -2]], "predicted": [[-2, -2]]}}]}

    def test_training(self):
        report = self.folder / "training.json"
        report.write_text(json.dumps(self.TRAINING))
        svg = self.expect_image("training.svg", "train", report)
        self.assertIn(b"<svg", svg)
        self.assertEqual(svg, self.expect_image("again.svg", "train", report))
        self.assertNotEqual(svg, self.expect_image("layers.svg", "train", report, "--by-layer"))
        self.assertTrue(self.expect_image("two.png", "train", report, report).startswith(b"\x89PNG"))

        def expect(*parts, layer):
            layers = [*self.TRAINING["layers"], layer]
            report.write_text(json.dumps({**self.TRAINING, "layers": layers}))
            self.expect_error("training.json", *parts, arguments=["train", report])

        sample = {"oracle": [[1, 2]], "predicted": [[1, 2]]}
        expect("layers:", "a list of objects", layer=3)
        expect("layers[3].r2", layer={"sample": sample})
        expect("layers[3].r2", "2 numbers", layer={"r2": [0.5], "sample": sample})
        expect("layers[3].r2", layer={"r2": [0.5, "x"], "sample": sample})
        expect("layers[3].sample", layer={"r2": [0.5, 0.5]})
        expect("layers[3].sample.oracle", layer={"r2": [0.5, 0.5], "sample": {**sample, "oracle": [[1]]}})
        expect("layers[3].sample.predicted", layer={"r2": [0.5, 0.5], "sample": {**sample, "predicted": None}})
        expect("layers[3].sample.predicted", layer={"r2": [0.5, 0.5], "sample": {**sample, "predicted": []}})
        report.write_text(json.dumps({**self.TRAINING, "layers": []}))
        self.expect_error("layers", arguments=["train", report])

    def test_thresholds(self):
        texts = self.folder / "texts.txt"
        texts.write_text("".join("The key of the red door is 4711. " * n + "\n" for n in (20, 30, 40)))
        table = self.folder / "thresholds.json"
        result = run_command([KVZAP, "calibrate", "-m", MODEL, "--surrogate", LINEAR, "-f", texts, "--window", "32",
                              "--evict-ratio", "0.2,0.4", "-o", table])
        self.assertEqual(result.code, 0, result)
        svg = self.expect_image("thresholds.svg", "thresholds", table)
        self.assertIn(b"<svg", svg)
        self.expect_image("two.svg", "thresholds", table, table)
        good = json.loads(table.read_text())
        for name in ("threshold", "mean", "deviation", "least", "most"):
            rows = [dict(good["rows"][0]), {**good["rows"][1], name: "x"}]
            table.write_text(json.dumps({**good, "rows": rows}))
            self.expect_error("thresholds.json", f"rows[1].{name}", "a number", arguments=["thresholds", table])
        table.write_text(json.dumps({**good, "rows": []}))
        self.expect_error("rows", arguments=["thresholds", table])
        self.expect_error("kvzap.training", "kvzap.thresholds", arguments=["train", table])

    def test_bad_files(self):
        good = {"format": "kvzap.run", "format_version": 1, "answers": [],
                "context": {"tokens": 10, "kept_rows": [[1, 2], [3, 4]]}}
        report = self.folder / "report.json"

        def expect(*parts, text=None, **changes):
            report.write_text(json.dumps({**good, **changes}) if text is None else text)
            self.expect_error("report.json", *parts, arguments=["kept", report])

        expect("not JSON", text='{"format": ')
        expect("a JSON object", text="[]")
        expect("format_version", "2", format_version=2)
        expect("context", context=None)
        expect("tokens", "0", context={"tokens": 0, "kept_rows": [[1]]})
        expect("tokens", "true", context={"tokens": True, "kept_rows": [[1]]})
        expect("answers", answers={"0": 1})
        expect("answers", answers=[1])
        expect("kept_rows", context={"tokens": 10, "kept_rows": [[1, 2], [3]]})
        expect("kept_rows", context={"tokens": 10, "kept_rows": [[1, "x"]]})
        self.expect_error("No such file", arguments=["kept", self.folder / "none.json"])
        report.write_text(json.dumps(good))
        result = plot("kept", report, "-o", self.folder / "kept.doc")
        self.assertEqual(result.code, 1, result)
        self.assertIn(b"svg", result.err)
        result = plot("kept", report, "-o", self.folder / "no" / "kept.svg")
        self.assertEqual(result.code, 1, result)
        self.assertIn(b"No such file", result.err)
        result = plot("kept", report, "-o", report / "kept.svg")
        self.assertEqual((result.code, len(result.err.splitlines())), (1, 1), result)


if __name__ == "__main__":
    unittest.main()
