"""kvzap-plot on what the program writes, and on what it does not."""
import contextlib
import html.parser
import importlib.util
import io
import json
import pathlib
import re
import shutil
import sys
import unittest
import unittest.mock
import warnings
import xml.etree.ElementTree

from evaluations import TASKS, write_evaluation
from harness import HAVE_HDF5, KVZAP, LINEAR, MODEL, SOURCE, Result, TestCase, kvzap, run_command

PLOT = SOURCE / "drivers" / "kvzap_plot.py"
sys.path.insert(0, str(PLOT.parent))
from plot.arguments import parser
from plot.command import main, settle
from plot.evaluation_files import Evaluation, lines_of, split_setting
from plot.kept import Kept, plot_kept
from plot.positions import Positions
from plot.scores import Dump
from plot.snapshot_figures import ScoreCounts
from plot.snapshot_file import Snapshot, keep_ratios, position_shares
from plot.style import COLORS, MARKERS
from plot.training import plot_training
from plot.words import label_words

HAVE_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
HAVE_H5PY = importlib.util.find_spec("h5py") is not None


def plot(*arguments):
    return run_command([sys.executable, "-B", PLOT, *arguments])


def plot_here(*arguments):
    """The same in this process, which imports matplotlib once."""
    out, err = io.StringIO(), io.StringIO()
    with unittest.mock.patch.object(sys, "argv", ["kvzap-plot", *map(str, arguments)]):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with warnings.catch_warnings():
                code = main()
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
    return Result(code, out.getvalue().encode(), err.getvalue().encode())


class PlotCase(TestCase):
    plot = staticmethod(plot)

    def expect_image(self, name, *arguments):
        image = self.folder / name
        result = self.plot(*arguments, "-o", image)
        self.assertEqual((result.code, result.out, result.err), (0, b"", b""), result)
        content = image.read_bytes()
        self.assertEqual([p.name for p in self.folder.glob("*.tmp-*")], [])
        return content

    def expect_error(self, *parts, arguments):
        result = self.plot(*arguments, "-o", self.folder / "never.svg")
        self.assertEqual((result.code, result.out), (1, b""), result)
        lines = result.err.decode().splitlines()
        self.assertEqual(len(lines), 1, result)
        for part in ("kvzap-plot: error:", *parts):
            self.assertIn(part, lines[0])
        self.assertEqual(list(self.folder.glob("never*")), [])


@unittest.skipUnless(HAVE_MATPLOTLIB, "needs matplotlib")
class Plots(PlotCase):
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

    def test_the_command_beside_the_program(self):
        result = run_command([pathlib.Path(KVZAP).with_name("kvzap-plot"), "kept", "--help"])
        self.assertEqual((result.code, result.err), (0, b""), result)

    def test_ratios_of_heads(self):
        def report(name, tokens, rows):
            file = self.folder / name
            file.write_text(json.dumps({"format": "kvzap.run", "format_version": 1, "answers": [],
                                        "context": {"tokens": tokens, "kept_rows": rows}}))
            return file

        files = report("a.json", 10, [[5, 10], [0, 2]]), report("b.json", 20, [[15, 20], [10, 7]])
        ratios = self.folder / "heads.json"
        self.expect_image("kept.svg", "kept", *files, "--ratios", ratios)
        self.assertEqual(json.loads(ratios.read_text()), [[0.375, 0], [0.75, 0.725]])
        self.expect_error("--ratios", "is the input", arguments=["kept", *files, "--ratios", files[1]])
        self.expect_error("No such file", arguments=["kept", *files, "--ratios", self.folder / "no" / "f"])
        self.expect_error("--ratios", "is the plot", arguments=["kept", *files, "--ratios", self.folder / "." / "never.svg"])
        result = self.plot("kept", *files, "--ratios", "-", "-o", self.folder / "kept.svg")
        self.assertEqual((result.code, json.loads(result.out)), (0, [[0.375, 0], [0.75, 0.725]]), result)
        self.assertFalse(pathlib.Path("-").exists())
        for rows, found in (([[5, 11], [0, 2]], "11"), ([[5, 10], [0, -1]], "-1")):
            self.expect_error("d.json: kept_rows: expected 0 to 10 rows", f"found {found}",
                              arguments=["kept", report("d.json", 10, rows)])
        other = report("c.json", 20, [[15, 20, 3], [10, 7, 3]])
        self.expect_error("c.json: kept_rows: expected 2 layers of 2 KV heads as in", "found 2 layers of 3 KV heads",
                          arguments=["kept", files[0], other, "--ratios", ratios])

    @unittest.skipUnless(HAVE_HDF5 and HAVE_H5PY, "needs HDF5 and h5py")
    def test_positions(self):
        snapshot = self.folder / "cache.h5"
        self.run_model("--snapshot", snapshot)
        self.assertIn(b"<svg", self.expect_image("positions.svg", "positions", snapshot))
        # What is drawn: the window in full, and as many pairs as the file has.
        drawn = Positions(snapshot, 10**9, by_head=False)
        shares, tokens = drawn.rows, drawn.tokens
        self.assertTrue((shares[:, tokens - 32:] == 1).all())
        self.assertEqual((drawn.window, drawn.sink), (32, 0))
        self.assertEqual(drawn.words[0], MODEL.name)
        self.assertIn("threshold -3.400", drawn.words[1])
        heads_apart = Positions(snapshot, 10**9, by_head=True)
        self.assertEqual(len(heads_apart.rows), len(shares) * heads_apart.heads)
        self.assertTrue((abs(heads_apart.shares.mean(axis=1) - shares) < 1e-12).all())
        self.assertIn(b"sinks", self.expect_texts("heads.svg", "positions", self.with_sinks(snapshot), "--by-head"))
        import h5py

        with h5py.File(snapshot) as file:
            heads = int(file.attrs["n_kv_heads"])
            for layer, row in enumerate(shares):
                self.assertAlmostEqual(row.sum() * heads, len(file[f"layers/{layer}/positions"]))
        # The text is what the model was given.
        page = Page(self.expect_image("page.html", "snapshot", snapshot, "--kind", "text").decode())
        text = "".join(text for _, _, text in page.tokens)
        self.assertIn((self.folder / "prompt.txt").read_text().rstrip(), text)
        self.expect_error("cut.h5", arguments=["positions", self.cut(snapshot, "cut.h5")])

    def with_sinks(self, snapshot):
        import h5py

        other = self.folder / "sinks.h5"
        shutil.copy(snapshot, other)
        with h5py.File(other, "r+") as file:
            file.attrs["sink"] = 4
        return other

    def expect_texts(self, name, *arguments):
        """The image with its texts as texts."""
        import matplotlib

        with matplotlib.rc_context({"svg.fonttype": "none"}):
            return self.expect_image(name, *arguments)

    @unittest.skipUnless(HAVE_HDF5 and HAVE_H5PY, "needs HDF5 and h5py")
    def test_kinds_of_files(self):
        """Every kind draws what it can of a file, or says which kind does."""
        report, snapshot, dump = (self.folder / name for name in ("run.json", "cache.h5", "dump.safetensors"))
        self.run_model("--json", report, "--snapshot", snapshot, "--dump", dump)
        of_report, of_snapshot = Kept(report, "context"), Kept(snapshot, "context")
        self.assertEqual(of_report.shares, of_snapshot.shares)
        self.assertEqual((of_report.tokens, of_report.words[0]), (of_snapshot.tokens, MODEL.name))
        self.assertIn(b"<svg", self.expect_image("both.svg", "kept", report, snapshot))
        for kind, file, *parts in (("kept", dump, "kvzap-plot scores"), ("bench", report, "kvzap-plot kept"),
                                   ("positions", report, "kvzap-plot kept"), ("snapshot", dump, "kvzap-plot scores"),
                                   ("train", snapshot, "HDF5", "kvzap-plot snapshot"),
                                   ("kept", dump.with_name("dump.safetensors"), "expected a report of kvzap run")):
            self.expect_error(file.name, *parts, arguments=[kind, file])
        # Scores: those of a snapshot, and those of every pair of the context with what became of them.
        self.assertEqual(self.expect_image("a.svg", "scores", snapshot),
                         self.expect_image("b.svg", "snapshot", snapshot, "--kind", "scores"))
        self.assertIn(b"threshold -3.400", self.expect_texts("c.svg", "scores", dump, "--threshold", "-3.4"))
        content = Dump(dump)
        kept = content.evicted == 0
        self.assertEqual(kept.mean(axis=2).round(12).tolist(),
                         [[round(share, 12) for share in layer] for layer in of_report.shares])
        self.assertTrue((content.scores[~kept] < -3.4).all())
        page = self.expect_image("d.html", "text", snapshot, "--title", "My <text>").decode()
        self.assertIn("<h1>My &lt;text&gt;</h1>", page)
        self.expect_error("text", ".html", arguments=["text", snapshot])
        self.expect_error("--threshold", arguments=["scores", snapshot, "--threshold", "1"])
        for size in (7, 700):
            part = self.folder / "cut.safetensors"
            part.write_bytes(dump.read_bytes()[:size])
            self.expect_error("cut.safetensors", arguments=["scores", part])

    def test_title_size_and_format(self):
        report = self.folder / "run.json"
        shares = [[[0.25, 1.0], [0.5, 0.5], [0.125, 0.25]], [[0.5], [0.25]]]
        files = []
        for number, rows in enumerate(shares):
            files.append(self.folder / f"run{number}.json")
            files[-1].write_text(json.dumps({
                "format": "kvzap.run", "format_version": 1, "model": {"path": "a/Model-$1"}, "answers": [],
                "policy": "snapkv:window=8+ada", "options": {"evict_ratio": 0.75, "window": 64},
                "context": {"tokens": 8, "kept_rows": [[int(8 * s) for s in layer] for layer in rows]}}))
        report = files[0]
        svg = self.expect_texts("own.svg", "kept", report).decode()
        for words in ("Model-$1", "snapkv:window=8+ada, evict ratio 0.75", "window 64", "8 tokens, keep ratio 0.44"):
            self.assertIn(words, svg)
        # Layers of several models have axes of their own.
        import matplotlib.pyplot as pyplot

        options = parser().parse_args(["kept", *map(str, files)])
        settle(options)
        axes = [ax for ax in plot_kept(options, pyplot).axes if ax.get_xlabel() == "KV head"]
        self.assertEqual([ax.images[0].get_array().shape for ax in axes], [(3, 2), (2, 1)])
        self.assertEqual([ax.get_ylim() for ax in axes], [(2.5, -0.5), (1.5, -0.5)])
        titled = self.expect_texts("titled.svg", "kept", report, "--title", "A title", "--size", "3.5x2.5").decode()
        self.assertIn("A title", titled)
        self.assertNotIn("keep ratio 0.44", titled)
        self.assertRegex(titled, r'<svg [^>]*width="252pt"')
        self.assertTrue(self.expect_image("no.ending", "kept", report, "--format", "png").startswith(b"\x89PNG"))
        for flag, value, part in (("--size", "3.5", "3.5x2.6"), ("--size", "0x3", "3.5x2.6"), ("--format", "docx", "png")):
            self.expect_error(flag, part, arguments=["kept", report, flag, value])
        # Any name may be given with --format: that of the input, a link, a pipe.
        before = report.read_bytes()
        result = self.plot("kept", report, "--format", "png", "-o", self.folder / "." / ".." / self.folder.name / "run0.json")
        self.assertEqual((result.code, report.read_bytes()), (1, before), result)
        self.assertIn("is the input", result.err.decode())
        (self.folder / "link").symlink_to("after.png")
        self.expect_image("link", "kept", report, "--format", "png")
        self.assertTrue((self.folder / "link").is_symlink())
        self.assertTrue((self.folder / "after.png").read_bytes().startswith(b"\x89PNG"))
        device = self.folder / "device"
        device.symlink_to("/dev/stdout")
        result = self.plot("kept", report, "--format", "png", "-o", device)
        self.assertTrue(result.out.startswith(b"\x89PNG"), result)
        self.assertTrue(device.is_symlink())
        for flags, begin in ((["--format", "png"], b"\x89PNG"), ([], b"<?xml")):
            result = plot("kept", report, *flags, "-o", "-")
            self.assertEqual((result.code, result.out[:len(begin)]), (0, begin), result)
        self.assertFalse(pathlib.Path("-").exists())

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
        svg = self.expect_texts("bench.svg", "bench", report).decode()
        for words in (MODEL.name, "1 rank", "tokens/s", "KV, ", "evicted", "evict ratio 0.5"):
            self.assertIn(words, svg)
        self.expect_error("bench.json", "kvzap run --json", "kvzap-plot bench", arguments=["kept", report])

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
        self.assertEqual(svg, self.expect_image("of-folder.svg", "train", report.parent))
        self.assertNotEqual(svg, self.expect_image("layers.svg", "train", report, "--by-layer"))
        self.assertTrue(self.expect_image("two.png", "train", report, report).startswith(b"\x89PNG"))

        # The scatter of a deep model is as high as the map of heads and the colour bars beside it.
        from matplotlib import pyplot

        report.write_text(json.dumps({**self.TRAINING, "layers": 10 * self.TRAINING["layers"]}))
        figure = plot_training(parser().parse_args(["train", str(report), "-o", "x.svg"]), pyplot)
        figure.canvas.draw()
        heights = [ax.get_position().height for ax in figure.findobj(pyplot.Axes)]
        self.assertEqual(len(heights), 4)
        self.assertGreater(min(heights), 0.8 * max(heights))
        pyplot.close(figure)

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
        self.assertEqual(svg, self.expect_image("of-folder.svg", "thresholds", table.parent))
        self.expect_image("two.svg", "thresholds", table, table)
        good = json.loads(table.read_text())
        for name in ("threshold", "mean", "deviation", "least", "most"):
            rows = [dict(good["rows"][0]), {**good["rows"][1], name: "x"}]
            table.write_text(json.dumps({**good, "rows": rows}))
            self.expect_error("thresholds.json", f"rows[1].{name}", "a number", arguments=["thresholds", table])
        table.write_text(json.dumps({**good, "rows": []}))
        self.expect_error("rows", arguments=["thresholds", table])
        windows = [{"window": window, "rows": good["rows"]} for window in (32, 8)]
        table.write_text(json.dumps({**good, "format_version": 2, "windows": windows}))
        self.expect_image("windows.svg", "thresholds", table)
        table.write_text(json.dumps({**good, "format_version": 2, "windows": [*windows, {"window": 1, "rows": []}]}))
        self.expect_error("windows[2].rows", arguments=["thresholds", table])
        table.write_text(json.dumps({**good, "format_version": 2, "windows": [1]}))
        self.expect_error("windows", arguments=["thresholds", table])
        self.expect_error("kvzap train", "kvzap-plot thresholds", arguments=["train", table])

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


class Page(html.parser.HTMLParser):
    """Tokens (class, attributes, text), rows of the table of ratios, the data and all attributes of a page."""

    def __init__(self, text):
        super().__init__()
        self.tokens, self.rows, self.attributes, self.data, self.notes, self.sections = [], [], [], None, [], []
        self.path, self.in_tokens, self.in_ratios = [], False, False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.path.append((tag, attributes))
        self.attributes += attributes.items()
        if tag == "section":
            self.sections.append(attributes["id"])
        self.in_tokens |= attributes.get("id") == "tokens"
        if tag == "table":
            self.in_ratios = attributes.get("id") == "ratios"
        if self.in_tokens and tag == "b":
            self.tokens.append([attributes.get("class"), attributes, ""])
        if self.in_ratios and tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag):
        self.in_tokens &= tag != "div"
        self.in_ratios &= tag != "table"
        self.path = []

    def handle_data(self, data):
        tag, attributes = self.path[-1] if self.path else (None, {})
        if self.in_tokens and tag == "b":
            self.tokens[-1][2] += data
        elif self.in_ratios and tag in ("td", "th"):
            self.rows[-1].append(data)
        elif attributes.get("id") == "data":
            self.data = json.loads(data)
        elif attributes.get("class") == "note":
            self.notes.append(data)


@unittest.skipUnless(HAVE_MATPLOTLIB and HAVE_H5PY, "needs matplotlib and h5py")
class Snapshots(PlotCase):
    plot = staticmethod(plot_here)
    LAYERS, HEADS, TOKENS, WINDOW = 5, 3, 60, 8

    def setUp(self):
        super().setUp()
        self.snapshot = self.folder / "cache.h5"
        # A model's folder with a tokenizer alone: "é" in two bytes, an end of line, and what a page must not run.
        self.model = self.folder / "model"
        self.model.mkdir()
        self.vocabulary = {"The": 0, "Ġdoor": 1, "Ã": 2, "©": 3, "Ċ": 4, "ä½łå¥½": 5, "</script>": 6, "&": 7, "Å": 8}
        self.texts = {0: "The", 1: " door", 4: "↵\n", 5: "你好", 6: "</script>", 7: "&", 9: "<|end|>"}
        (self.model / "tokenizer.json").write_text(json.dumps({
            "model": {"type": "BPE", "vocab": self.vocabulary, "merges": []},
            "added_tokens": [{"id": 9, "content": "<|end|>", "special": True}]}))
        self.ids = ([9, 0, 1, 2, 3, 4, 5, 6, 7, 77] * self.TOKENS)[:self.TOKENS + 2]

    def write(self, content="all", ids=True, closed_up=0, **attributes):
        """A snapshot as docs/reference/snapshot-format.md has it, without keys and values; [layer][head]: (positions, scores,
        judged)."""
        import h5py
        import numpy

        random = numpy.random.default_rng(7)
        rows = []
        with h5py.File(self.snapshot, "w") as file:
            values = {"kvzap_format_version": 2, "model": str(self.model), "prune": "prefill", "sink": 1,
                      "threshold": numpy.float32(-3.4), "dtype": "bf16", "n_layers": self.LAYERS, "head_dim": 4,
                      "n_kv_heads": self.HEADS, "window": self.WINDOW, "page_rows": 64, "tokens": self.TOKENS,
                      "content": content, "kvzap_version": "0", "context_tokens": 50, "compress": 0}
            file.create_group("state").attrs["closed_up"] = closed_up
            file["token_ids"] = numpy.array(self.ids if ids else [], "<i4")
            for name, value in {**values, **attributes}.items():
                file.attrs[name] = numpy.int64(value) if isinstance(value, int) else value
            for n in range(self.LAYERS):
                layer = file.create_group(f"layers/{n}")
                rows.append([])
                for head in range(self.HEADS):
                    kept = random.random(self.TOKENS) < [0, 0.1, 0.4, 0.7, 1][n] * (head + 1) / self.HEADS
                    kept[-self.WINDOW:] = True
                    positions = numpy.flatnonzero(kept)
                    judged = positions < self.TOKENS - self.WINDOW
                    scores = random.uniform(-3.4, 1, len(positions)).astype("f4")
                    scores[~judged] -= 2
                    scores[0] = numpy.nan
                    rows[-1].append((positions, scores, judged))
                layer["offsets"] = numpy.cumsum([0, *(len(p) for p, _, _ in rows[-1])])
                together = [numpy.concatenate(parts) for parts in zip(*rows[-1])]
                layer["positions"] = together[0].astype("<i4")
                if content != "positions":
                    layer["scores"] = together[1]
                layer["judged"] = together[2].astype("u1")
        return rows

    def page(self, *arguments, notes=()):
        output = self.folder / "page.html"
        result = self.plot("snapshot", self.snapshot, "-o", output, *arguments)
        self.assertEqual((result.code, result.out), (0, b""), result)
        lines = result.err.decode().splitlines()
        self.assertEqual(len(lines), len(notes), result)
        for line, note in zip(lines, notes):
            self.assertIn(note, line)
        text = output.read_text()
        page = Page(text)
        self.assertEqual(len(page.notes), len(notes))
        # Nothing from elsewhere: references lead to the page's own parts, or are data.
        for name, value in page.attributes:
            if name in ("src", "href", "xlink:href", "action", "srcset"):
                self.assertRegex(value, "^(#|data:image/png;base64,)")
        self.assertNotRegex(text, r"@import|url\((?!#)")
        ids = [value for name, value in page.attributes if name == "id"]
        self.assertEqual(len(ids), len(set(ids)))
        return page

    def test_figures(self):
        import numpy

        rows = self.write()
        for kind in ("kept", "raster", "scores", "positions", "all"):
            self.assertIn(b"<svg", self.expect_image(f"{kind}.svg", "snapshot", self.snapshot, "--kind", kind))
        column = ("snapshot", self.snapshot, "--column", "--layer", "2", "--bins", "7")
        self.assertEqual(self.expect_image("column.svg", *column), self.expect_image("again.svg", *column))
        self.assertTrue(self.expect_image("kept.pdf", *column, "--kind", "kept").startswith(b"%PDF"))
        # What is drawn, against the rows that were written.
        kept = numpy.zeros((self.LAYERS, self.HEADS, self.TOKENS))
        for layer, heads in zip(kept, rows):
            for head, (positions, _, _) in zip(layer, heads):
                head[positions] = 1
        with Snapshot(self.snapshot) as snapshot:
            layers = [0, 2, 3]
            numpy.testing.assert_allclose(keep_ratios(snapshot, layers), kept[layers].mean(axis=2))
            shares, edges = position_shares(snapshot, layers, 10**9, by_head=True)
            numpy.testing.assert_array_equal(shares, kept[layers])
            shares, edges = position_shares(snapshot, layers, 7)
            numpy.testing.assert_allclose(shares, [
                [heads[:, int(a):int(b)].mean() for a, b in zip(edges, edges[1:])] for heads in kept[layers]])
            counts = ScoreCounts(snapshot, layers, 20)
            self.assertIn(numpy.float32(-3.4), counts.edges.astype("f4"))
            for count, n in zip(counts.counts, layers):
                for row, wanted in zip(count, (True, False)):
                    scores = numpy.concatenate([s[judged == wanted] for _, s, judged in rows[n]])
                    numpy.testing.assert_array_equal(row, numpy.histogram(scores[~numpy.isnan(scores)],
                                                                          counts.edges)[0])
            self.assertEqual(counts.counts.sum() + counts.without + counts.beyond, kept[layers].sum())
            self.assertEqual(counts.without, len(layers) * self.HEADS)
            judged = counts.counts[:, 0, counts.edges[:-1] < -3.4 - 1e-6]
            self.assertEqual(judged.sum(), 0)  # none of the evicted
        drawn = Positions(self.snapshot, 10**9, by_head=False)
        shares = drawn.rows
        self.assertEqual(drawn.tokens, self.TOKENS)
        numpy.testing.assert_allclose(shares, kept.mean(axis=1))
        self.expect_image("positions.svg", "positions", self.snapshot)

    def check_tokens(self, page, rows, layers, is_text=True):
        self.assertEqual(page.data["layers"], layers)
        self.assertEqual(len(page.tokens), len(self.ids))
        pieces = {2: "▫", 3: "é", 77: "⟨77⟩", **self.texts}
        for position, ((classes, attributes, text), number) in enumerate(zip(page.tokens, self.ids)):
            self.assertEqual(text, pieces[number] if is_text else f"{number} ")
            self.assertEqual(int(attributes["data-i"]), number)
            if position >= self.TOKENS:
                self.assertEqual(classes, "u")
                continue
            mask = bin(int("1" + page.data["masks"][int(attributes["data-m"])], 16))[3:]
            keeps = [int(position in rows[n][head][0]) for n in layers for head in range(self.HEADS)]
            self.assertEqual([int(bit) for bit in mask[:len(keeps)]], keeps)
            level = -(-10 * sum(keeps) // len(keeps))
            self.assertEqual(classes.split(), [f"s{level}"] + ["n"] * (position >= self.TOKENS - self.WINDOW))

    def test_page(self):
        rows = self.write()
        page = self.page()
        self.assertEqual(page.sections, ["kept", "raster", "scores", "positions", "text"])
        self.check_tokens(page, rows, [0, 1, 2, 3, 4])
        for n, row in enumerate(page.rows[1:]):
            ratios = [len(positions) / self.TOKENS for positions, _, _ in rows[n]]
            self.assertEqual(row, [str(n), *(f"{ratio:.4f}" for ratio in [*ratios, sum(ratios) / self.HEADS])])
        page = self.page("--kind", "text", "--layer", "3,0-1")
        self.assertEqual(page.sections, ["text"])
        self.check_tokens(page, rows, [0, 1, 3])
        self.assertEqual(self.page("--kind", "kept").sections, ["kept"])
        # Without texts, ids. (A terminal would take the folder's name for a command.)
        self.write(model="\033[31mnowhere")
        page = self.page("--kind", "text", notes=["\N{REPLACEMENT CHARACTER}[31mnowhere/tokenizer.json: No such file"])
        self.check_tokens(page, rows, [0, 1, 2, 3, 4], False)
        self.check_tokens(self.page("--kind", "text", "--model", self.model), rows, [0, 1, 2, 3, 4])

    def test_a_folder_of_figures(self):
        self.write()
        for arguments, names in (
                ([], ["kept.svg", "positions.svg", "raster.svg", "scores.svg", "text.html"]),
                (["--format", "png"], ["kept.png", "positions.png", "raster.png", "scores.png", "text.html"]),
                (["--kind", "kept"], ["kept.svg"]), (["--kind", "text"], ["text.html"])):
            folder = self.folder / "-".join(["out", *arguments])
            result = self.plot("snapshot", self.snapshot, *arguments, "-o", f"{folder}/")
            self.assertEqual((result.code, result.err), (0, b""), result)
            self.assertEqual(sorted(file.name for file in folder.iterdir()), names)
        one = self.folder / "one.svg"
        self.plot("snapshot", self.snapshot, "--kind", "kept", "-o", one)
        self.assertEqual(one.read_bytes(), (self.folder / "out/kept.svg").read_bytes())
        page = plot("text", self.snapshot, "-o", "-")
        self.assertEqual((page.code, page.out), (0, (self.folder / "out/text.html").read_bytes()), page)

    def test_what_a_file_lacks(self):
        for arguments, missing, notes in (
                ({"content": "scores"}, set(), []), ({"ids": False}, {"text"}, ["no text: the file has no token ids"]),
                ({"content": "positions"}, {"scores"}, ["no histograms: the file has no scores"]),
                ({"closed_up": 4}, {"text"}, ["no text: positions were closed up"])):
            with self.subTest(**arguments):
                self.write(**arguments)
                if "content" in arguments:
                    sections = self.page("--layer", "1", notes=notes).sections
                    self.assertEqual(set(sections), {"kept", "raster", "scores", "positions", "text"} - missing)
                for kind in missing:
                    result = self.plot("snapshot", self.snapshot, "--kind", kind, "-o", self.folder / "no.html")
                    self.assertEqual((result.code, len(result.err.splitlines())), (1, 1), result)
        self.write(content="positions")
        result = self.plot("snapshot", self.snapshot, "-o", self.folder / "some.svg")
        self.assertEqual((result.code, len(result.err.splitlines())), (0, 1), result)
        # A budget has no threshold.
        for attributes, threshold in (({}, -3.4), ({"budget": "evict-ratio=0.5"}, None), ({"prune": "none"}, None)):
            self.write(**attributes)
            with Snapshot(self.snapshot) as snapshot:
                self.assertAlmostEqual(snapshot.threshold or 0, threshold or 0, places=6)

    def test_bad_input(self):
        import h5py
        import numpy

        def expect(*parts, arguments=(), change=None, **attributes):
            self.write(**attributes)
            if change:
                with h5py.File(self.snapshot, "r+") as file:
                    change(file)
            self.expect_error(*parts, arguments=["snapshot", self.snapshot, *arguments])

        def replace(path, values):
            def change(file):
                del file[path]
                if values is not None:
                    file[path] = values
            return change

        for version in (1, 4):
            expect("kvzap_format_version", "expected 2 or 3", f"found {version}", kvzap_format_version=version)
        expect("kvzap_format_version", "an integer", kvzap_format_version="2")
        expect("tokens", "an integer from 1", "found 0", tokens=0)
        expect("n_layers", "groups", n_layers=10**15)
        expect("layers/0/offsets", "rows", n_kv_heads=10**15)
        expect("layers/0/positions", "positions from 0 to 9", tokens=10)
        expect("content", "found keys", content="keys")
        expect("threshold", "a number", threshold="low")
        expect("model", "text", model=3)
        expect("tokens", "found none", change=lambda file: file.attrs.pop("tokens"))
        expect("layers", "found none", change=replace("layers", None))
        expect("layers/2/offsets", "rise", change=replace("layers/2/offsets", [0, 5, 2, 9]))
        expect("layers/1/positions", "within a head", change=replace("layers/1/positions", numpy.zeros(
            sum(len(p) for p, _, _ in self.write()[1]), int)))
        expect("layers/1/positions", "integers", change=replace("layers/1/positions", [0.5]))
        expect("layers/1/positions", "one dimension", change=replace("layers/1/positions", [[1]]))
        expect("layers/0/scores", "numbers", change=replace("layers/0/scores", ["a"]))
        expect("layers/3/scores", "found none", change=replace("layers/3/scores", None))
        expect("layers/0/positions", "fit the file", change=lambda file: (
            replace("layers/0/positions", None)(file),
            file.create_dataset("layers/0/positions", (10**9,), "i4", chunks=(1000,))))
        expect("token_ids", "found none", change=replace("token_ids", None))
        expect("state", "found none", change=replace("state", None))
        expect("token_ids", "integers", change=replace("token_ids", [0.5]))
        expect("--layer", "0 to 4", '"5"', arguments=["--layer", "1,5"])
        expect("--layer", '"4-2"', arguments=["--layer", "4-2"])
        expect("--bins", arguments=["--bins", "0"])
        expect("--kind text", ".html", "never.svg", arguments=["--kind", "text"])
        for name, tokenizer in (("not JSON", "{"), ("model.vocab", "[]"), ("model.vocab", '{"model": {"vocab": [1]}}'),
                                ("added_tokens", '{"model": {"vocab": {}}, "added_tokens": [1]}')):
            (self.model / "tokenizer.json").write_text(tokenizer)
            result = self.plot("snapshot", self.snapshot, "--model", self.model, "-o", self.folder / "no.html")
            self.assertEqual((result.code, len(result.err.splitlines())), (1, 1), result)
            self.assertIn(name, result.err.decode())
        self.write()
        whole = self.snapshot.read_bytes()
        for size in range(0, len(whole), len(whole) // 16):
            self.snapshot.write_bytes(whole[:size])
            self.expect_error("cache.h5", arguments=["snapshot", self.snapshot])
        self.expect_error("No such file", arguments=["snapshot", self.folder / "none.h5"])
        self.expect_error("Is a directory", arguments=["snapshot", self.folder])
        with h5py.File(self.snapshot, "w") as file:
            file["other"] = [1]
        self.expect_error("cache.h5", "kvzap_format_version", "snapshot of kvzap", arguments=["snapshot", self.snapshot])


@unittest.skipUnless(HAVE_MATPLOTLIB, "needs matplotlib")
class Eval(PlotCase):
    plot = staticmethod(plot_here)
    POLICIES = ("kvzap", "snapkv", "knorm+ada", "tova", "keydiff", "lagkv", "h2o", "cur", "leverage", "streaming-llm")

    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"

    def texts(self, name, *arguments):
        """What stands in an image: its texts, in paths, are told in comments."""
        svg = self.expect_image(name, "eval", *arguments)
        parser = xml.etree.ElementTree.XMLParser(target=xml.etree.ElementTree.TreeBuilder(insert_comments=True))
        root = xml.etree.ElementTree.fromstring(svg, parser)
        size = [float(root.get(side).removesuffix("pt")) / 72 for side in ("width", "height")]
        return [node.text.strip() for node in root.iter(xml.etree.ElementTree.Comment)], size

    def test_curves(self):
        summary = write_evaluation(self.out, policies=self.POLICIES)
        texts, (width, _) = self.texts("curve.svg", self.out)
        for text in ("full cache", *self.POLICIES, "all prompts", *TASKS):
            self.assertEqual(texts.count(text), 1, text)
        self.assertAlmostEqual(width, 7)
        texts, (width, height) = self.texts("column.svg", self.out, "--column", "--tasks", "facts,all", "--policies",
                                            "kvzap;none")
        self.assertAlmostEqual(width, 3.3)
        self.assertLess(height, 2.5)
        self.assertEqual([t for t in texts if t in (*self.POLICIES, *TASKS, "all prompts", "full cache")],
                         ["facts", "all prompts", "full cache", "kvzap"])
        # What is drawn: every row's point, and no two lines that look the same.
        evaluation = Evaluation(self.out)
        evaluation.indices = range(len(evaluation.rows))
        lines = lines_of([evaluation])
        points = sorted((name, task, *point[:4]) for (name, _), line in lines.items()
                        for task, points in line["tasks"].items() for point in points)
        expected = sorted((row["setting"].split("@")[0], row["task"], row["evict_ratio_mean"],
                           *(100 * row[f] for f in ("accuracy", "accuracy_low", "accuracy_high")))
                          for row in summary["rows"])
        self.assertEqual(points, expected)
        looks = [(COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]) for i in range(80)]
        self.assertEqual(len(set(looks)), 80)
        self.assertEqual(split_setting(r"qfilter:filters=a\@b@evict-ratio=0.5@prune-after=question"),
                         (r"qfilter:filters=a\@b@prune-after=question", "evict-ratio"))

    def test_folder_of_plots(self):
        write_evaluation(self.out, tasks=("facts", "niah_noise"))
        plots = self.folder / "plots"
        contents = []
        for program in (plot, self.plot):
            result = program("eval", self.out, "--column", "-o", f"{plots}/")
            self.assertEqual((result.code, result.out, result.err), (0, b"", b""), result)
            contents.append({p.name: p.read_bytes() for p in plots.iterdir()})
        self.assertEqual(set(contents[0]), {f"{kind}.{ending}" for kind in ("curve", "spread", "kept")
                                            for ending in ("svg", "png")})
        self.assertTrue(contents[0] == contents[1])  # the same every time
        self.assertTrue(self.expect_image("curve.pdf", "eval", self.out, "--tasks", "all").startswith(b"%PDF"))
        # Without thresholds no spread is drawn, and it is said.
        write_evaluation(self.out, policies=("snapkv",), tasks=("facts",))
        result = self.plot("eval", self.out, "-o", f"{self.folder}/some/")
        self.assertEqual((result.code, len(result.err.splitlines())), (0, 1), result)
        self.assertIn(b"no spread", result.err)
        self.assertEqual(len(list((self.folder / "some").iterdir())), 4)

    def test_spread_and_kept(self):
        write_evaluation(self.out, policies=("kvzap", "snapkv"))
        texts, _ = self.texts("spread.svg", self.out, "--kind", "spread", "--evict-ratio", "0.4")
        self.assertEqual([t for t in texts if t in TASKS], list(TASKS))
        self.assertTrue(any(t.startswith("kvzap, threshold -4.000 (") and t.endswith(" % evicted)") for t in texts), texts)
        texts, _ = self.texts("two.svg", self.out, "--kind", "spread", "--tasks", "facts", "--settings",
                              "kvzap@threshold=-5;snapkv@evict-ratio=0.5")
        self.assertIn("snapkv, evict ratio 0.5", texts)
        self.assertIn("prompts: 0.50 to 0.50", texts)
        self.assertEqual([t for t in texts if t in TASKS], ["facts"])
        texts, _ = self.texts("kept.svg", self.out, "--kind", "kept", "--evict-ratio", "0.5")
        self.assertIn("evict ratio 0.5", texts)
        self.assertIn("threshold -4.000 (51 % evicted)", texts)
        self.assertEqual([t for t in texts if t in ("none", "kvzap", "snapkv")], ["kvzap", "snapkv"])
        evaluation = Evaluation(self.out)
        ratios = Evaluation.records(evaluation, "snapkv@evict-ratio=0.5")
        self.assertEqual(ratios, {task: [0.5] * 10 for task in TASKS})
        # A truncated record is ignored, as kvzap eval does when it continues.
        records = self.out / "records.jsonl"
        records.write_bytes(records.read_bytes()[:-9])
        self.texts("spread.svg", self.out, "--kind", "spread")
        with records.open("a") as file:
            file.write("\n")
        self.expect_error("records.jsonl", "line 240", "not JSON", arguments=["eval", self.out, "--kind", "spread"])

    def test_settings_in_words(self):
        for label, threshold, expected in (
                ("none", None, ("full cache", "")),
                ("none@kv-type=q8,q4", None, ("full cache", "kv type q8,q4")),
                ("snapkv@evict-ratio=0.5@kv-type=q4", None, ("snapkv", "evict ratio 0.5, kv type q4")),
                ("kvzap@threshold=-5.50583", -5.50583, ("kvzap", "threshold -5.506 (74 % evicted)")),
                ("kvzap@threshold=auto@prune=always", -1.7,
                 ("kvzap", "threshold auto, prune always (74 % evicted, threshold -1.700)")),
                ("kvzap@evict-ratio=0.75", -1.7, ("kvzap", "evict ratio 0.75 (74 % evicted, threshold -1.700)")),
                (r"qfilter:filters=a\@b\;c@evict-ratio=0.5", None, ("qfilter:filters=a@b;c", "evict ratio 0.5")),
                ("simlayerkv", None, ("simlayerkv", "(74 % evicted)"))):
            row = {"setting": label, "evict_ratio_mean": 0.7354, "threshold": threshold}
            self.assertEqual(label_words(row), expected)

    def test_several_evaluations(self):
        a, b = self.folder / "a", self.folder / "b"
        write_evaluation(a, policies=("kvzap", "snapkv"))
        write_evaluation(b, policies=("snapkv", "tova"), tasks=("facts", "long text"))
        texts, _ = self.texts("both.svg", a, b, "--tasks", "facts,long text")
        for text in ("kvzap", "a: snapkv", "b: snapkv", "tova", "a: full cache", "b: full cache", "long text"):
            self.assertIn(text, texts)
        write_evaluation(b, policies=("tova",), model="other")
        self.assertIn("other: tova", self.texts("models.svg", a, b, "--tasks", "all")[0])

    def test_perplexity_and_hostile_names(self):
        hostile = "_$\\frac{x$--><script>\ud800\n\u202e\u4f60" + "y" * 99
        summary = write_evaluation(self.out, policies=("kvzap", hostile), tasks=("text", hostile), model=hostile)
        for row in summary["rows"]:
            if row["task"] == "text":
                for name in ("accuracy", "accuracy_low", "accuracy_high"):
                    del row[name]
                row["perplexity"] = 20.5
        (self.out / "summary.json").write_text(json.dumps(summary))
        for kind in ("curve", "spread", "kept"):
            texts, _ = self.texts(f"{kind}.svg", self.out, "--kind", kind)
            self.assertFalse(any("\n" in text or "\u202e" in text for text in texts))
        texts, _ = self.texts("curve.svg", self.out)
        self.assertIn("perplexity", texts)

    def test_bad_files(self):
        good = write_evaluation(self.out)
        file = self.out / "summary.json"

        def expect(*parts, text=None, arguments=(), **changes):
            file.write_text(json.dumps({**good, **changes}) if text is None else text)
            self.expect_error(*parts, arguments=["eval", self.out, *arguments])

        def expect_row(*parts, arguments=(), **changes):
            rows = [dict(row) for row in good["rows"]]
            rows[3].update(changes)
            expect("summary.json: rows[3].", *parts, rows=rows, arguments=arguments)

        expect("not JSON", text="[" * 100000)
        expect("not JSON", text='{"format_version": ' + "9" * 5000 + "}")
        expect("the summary.json of kvzap eval", format="kvzap.run")
        expect("model.name", model={"name": 3})
        expect("rows:", rows=[])
        expect("rows[0]: expected an object", rows=[1])
        expect_row("task: expected text", task=None)
        expect_row("setting", setting=7)
        expect_row("accuracy: expected a number from 0 to 1, found 93", accuracy=93)
        expect_row("accuracy_low", accuracy_low="x")
        expect_row("evict_ratio_mean: expected a number from 0 to 1, found NaN", evict_ratio_mean=float("nan"))
        expect_row("evict_ratio_max", evict_ratio_max=10**400)
        expect_row("perplexity", "not negative", perplexity=-1)
        expect_row("perplexity", "found 1e+308", perplexity=1e308)
        kept = ("--kind", "kept", "--settings", good["rows"][3]["setting"], "--tasks", good["rows"][3]["task"])
        expect_row("keep_ratio: expected a list of numbers for each layer", keep_ratio=[[1], []], arguments=kept)
        expect_row("keep_ratio", keep_ratio=None, arguments=kept)
        expect("--tasks", '"facts"', '"fakts"', arguments=["--tasks", "fakts"])
        expect("--policies", '"snapkv"', '"snap"', arguments=["--policies", "snap"])
        expect("--settings", '"snapkv"', arguments=["--kind", "spread", "--settings", "snapkv"])
        expect("--evict-ratio", arguments=["--evict-ratio", "2"])
        expect("a setting with a threshold", arguments=["--kind", "spread", "--policies", "snapkv"])
        records = self.out / "records.jsonl"
        for line, part in (("{\n", "line 1: not JSON"), ("[1]\n", "line 1: expected an object"),
                           ('{"setting": "kvzap@threshold=-3", "task": 1}\n', "line 1: task: expected text"),
                           ('{"setting": "kvzap@threshold=-3", "task": "facts", "evict_ratio": 2}\n', "evict_ratio"),
                           ("{}\n", "a record of")):
            records.write_text(line)
            expect("records.jsonl", part, arguments=["--kind", "spread"])
        records.unlink()
        expect("records.jsonl", "No such file", arguments=["--kind", "spread"])
        file.unlink()
        self.expect_error("summary.json", "No such file", arguments=["eval", self.out])


if __name__ == "__main__":
    unittest.main()
