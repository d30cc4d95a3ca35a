"""kvzap train: surrogates from pairs that kvzap collect has gathered; ended early, continued, and refused."""
import json
import pathlib
import resource
import signal
import subprocess
import tempfile
import time
import unittest

from harness import HAVE_HDF5, KVZAP, MODEL, PATIENCE, SOURCE, TestCase, on_ranks, read_safetensors, run_command

TEXTS = SOURCE / "inputs/eval/train-texts.jsonl"


def train(*arguments, ranks=0, **options):
    return run_command(on_ranks(ranks, [KVZAP, "train", *arguments]), **options)


def files_of(folder):
    return sorted(path.name for path in folder.iterdir())


class PairsCase(TestCase):
    """With a file of pairs of the demo model."""

    @classmethod
    def setUpClass(cls):
        cls.shared = tempfile.TemporaryDirectory(prefix="kvzap-test-")
        cls.addClassCleanup(cls.shared.cleanup)
        cls.pairs = pathlib.Path(cls.shared.name) / "pairs.h5"
        done = run_command([KVZAP, "collect", "-m", MODEL, "-f", TEXTS, "--tokens-per-text", "100", "--min-tokens",
                            "120", "--max-tokens", "1000", "--max-texts", "24", "-o", cls.pairs])
        assert done.code == 0, done

    def succeed(self, *arguments, **options):
        result = train(*arguments, **options)
        self.assertEqual(result.code, 0, result)
        self.assertEqual(result.errors, [], result)
        return result

    def check_surrogate(self, folder, hidden):
        self.assertEqual(files_of(folder), ["README.md", "config.json", "model.safetensors", "training.json"])
        config = json.loads((folder / "config.json").read_text())
        model = json.loads((MODEL / "config.json").read_text())
        heads, layers, inputs = model["num_key_value_heads"], model["num_hidden_layers"], model["hidden_size"]
        self.assertEqual(
            (config["model_type"], config["architectures"], config["input_dim"], config["output_dim"],
             config["n_modules"], config["hidden_dim"]),
            ("kvzap", ["KVzapModel"], inputs, heads, layers, hidden))
        shapes = {name: (dtype, shape) for name, (dtype, shape, _) in
                  read_safetensors(folder / "model.safetensors").items()}
        wanted = {}
        for layer in range(layers):
            if hidden is None:
                wanted[f"layers.{layer}.weight"] = ("F32", [heads, inputs])
                wanted[f"layers.{layer}.bias"] = ("F32", [heads])
            else:
                wanted[f"layers.{layer}.0.weight"] = ("F32", [hidden, inputs])
                wanted[f"layers.{layer}.0.bias"] = ("F32", [hidden])
                wanted[f"layers.{layer}.2.weight"] = ("F32", [heads, hidden])
                wanted[f"layers.{layer}.2.bias"] = ("F32", [heads])
        self.assertEqual(shapes, wanted)
        report = json.loads((folder / "training.json").read_text())
        self.assertEqual((report["format"], report["format_version"]), ("kvzap.training", 1))
        self.assertEqual(report["training_pairs"] + report["validation_pairs"], report["options"]["pairs"])
        self.assertEqual([layer["layer"] for layer in report["layers"]], list(range(layers)))
        for layer in report["layers"]:
            self.assertEqual(len(layer["r2"]), heads)
            self.assertTrue(all(r is None or 0 <= r <= 1 for r in layer["r2"]))
            self.assertEqual(len(layer["sample"]["oracle"]), len(layer["sample"]["predicted"]))
            self.assertLessEqual(len(layer["sample"]["oracle"]), 300)
        return report


@unittest.skipUnless(HAVE_HDF5, "needs HDF5")
class Training(PairsCase):
    def test_both_kinds_are_trained_and_used(self):
        for kind, hidden in (("linear", None), ("mlp", 32)):
            with self.subTest(kind=kind):
                folder, copy = self.folder / kind, self.folder / f"{kind}.json"
                result = self.succeed(kind, self.pairs, "-o", folder, *(["--epochs", "40"] if hidden else []), "--json", copy,
                                      "--validation", "0.1", "--model-name", "the demo model")
                report = self.check_surrogate(folder, hidden)
                self.assertEqual(json.loads(copy.read_text()), report)
                self.assertGreater(report["r2_mean"], 0.4)
                self.assertTrue(report["validation_by_text"])
                card = (folder / "README.md").read_text()
                for part in ("the demo model", f"kvzap train {kind}", "--seed 0", "| 5 |"):
                    self.assertIn(part, card)
                table = result.text.splitlines()
                self.assertEqual(len(table), 8)
                self.assertIn("mean R2", table[-1])
                answer = run_command([KVZAP, "run", "-m", MODEL, "--surrogate", folder, "--threshold", "-3", "-n",
                                      "2", "-p", "The key of the red door is 4711. " * 20])
                self.assertEqual(answer.code, 0, answer)

    def test_json_takes_the_tables_place(self):
        result = self.succeed("linear", self.pairs, "-o", self.folder / "s", "--json", "-", "-q")
        self.assertEqual(result.err, b"")
        self.assertEqual(json.loads(result.out), json.loads((self.folder / "s/training.json").read_text()))

    def test_a_deck_gives_what_the_command_line_does_not(self):
        deck = self.folder / "deck.toml"
        deck.write_text(f'kind = "mlp"\npairs = "{self.pairs}"\noutput = "{self.folder / "s"}"\nhidden = 5\n'
                        "epochs = 1\n")
        self.succeed("--config", deck, "--hidden", "7")
        self.check_surrogate(self.folder / "s", 7)

    def test_ranks_and_types(self):
        for kind in ("linear", "mlp"):
            one, three = self.folder / f"{kind}1", self.folder / f"{kind}3"
            epochs = ["--epochs", "3"] if kind == "mlp" else []
            self.succeed(kind, self.pairs, "-o", one, *epochs)
            self.succeed(kind, self.pairs, "-o", three, *epochs, ranks=3)
            for name in ("model.safetensors", "config.json"):
                self.assertEqual((one / name).read_bytes(), (three / name).read_bytes())
        self.succeed("linear", self.pairs, "-o", self.folder / "narrow", "--dtype", "bf16")
        tensors = read_safetensors(self.folder / "narrow/model.safetensors")
        self.assertEqual({dtype for dtype, _, _ in tensors.values()}, {"BF16"})

    def test_ended_by_a_signal_it_goes_on_to_the_same_result(self):
        whole, folder = self.folder / "whole", self.folder / "parts"
        options = ("mlp", self.pairs, "--epochs", "300", "--batch", "64", "-q")
        self.succeed(*options, "-o", whole)
        endings = 0

        def written():
            return {path: path.stat().st_mtime_ns for path in folder.glob("checkpoint/layer-?.safetensors")
                    if path.exists()}

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            before = written()
            command = [KVZAP, "train", *map(str, options), "-o", str(folder), *["--resume"] * (endings > 0)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            # A checkpoint that it has written: by then it minds signals.
            deadline = time.monotonic() + PATIENCE
            while process.poll() is None and time.monotonic() < deadline and written() == before:
                time.sleep(0.002)
            process.send_signal(number)
            out, err = process.communicate(timeout=PATIENCE)
            if process.returncode == 0:
                break  # faster than the signal
            endings += 1
            self.assertEqual((process.returncode, out, err), (128 + number, b"", b""))
            self.assertEqual(files_of(folder), ["checkpoint"])
        self.assertGreater(endings, 0)
        if (folder / "checkpoint").exists():
            self.fail_with(train(*options, "-o", folder), "checkpoint", "--resume continues", code=1)
            self.fail_with(train(*options, "-o", folder, "--resume", "--seed", "7"), "seed: recorded 0, given 7",
                           code=1)
            self.succeed(*options, "-o", folder, "--resume")
        self.assertEqual((folder / "model.safetensors").read_bytes(), (whole / "model.safetensors").read_bytes())
        self.assertFalse((folder / "checkpoint").exists())

    def test_a_report_that_cannot_be_written_is_told_first(self):
        self.fail_with(train("linear", self.pairs, "-o", self.folder / "s", "--json", self.folder / "nowhere/r.json"),
                       "--json", "nowhere/r.json", code=1)
        self.assertFalse((self.folder / "s").exists())
        self.succeed("linear", self.pairs, "-o", self.folder / "s", "--json", self.folder / "s/report.json")
        self.assertEqual((self.folder / "s/report.json").read_bytes(), (self.folder / "s/training.json").read_bytes())

    def test_a_plot_that_cannot_be_drawn_loses_nothing(self):
        result = train("linear", self.pairs, "-o", self.folder / "s", "--plot", self.folder / "nowhere/plot.svg")
        self.assertEqual(result.code, 1, result)
        self.assertIn("--plot", result.errors[0])
        self.assertIn("is complete", result.errors[0])
        self.check_surrogate(self.folder / "s", None)


@unittest.skipUnless(HAVE_HDF5, "needs HDF5")
class BadInput(PairsCase):
    def test_options(self):
        pairs, folder = self.pairs, self.folder / "s"
        for arguments, parts in (
                ((), ["linear or mlp"]),
                (("cubic", pairs, "-o", folder), ["cubic", "linear or mlp"]),
                (("mlp",), ["no pairs"]),
                (("mlp", pairs), ["-o"]),
                (("mlp", pairs, "-o", folder, "--validation", "1"), ["--validation is 1"]),
                (("mlp", pairs, "-o", folder, "--validation", "nan"), ["--validation is nan"]),
                (("mlp", pairs, "-o", folder, "--hidden", "0"), ["--hidden is 0"]),
                (("mlp", pairs, "-o", folder, "--epochs", "0"), ["--epochs is 0"]),
                (("mlp", pairs, "-o", folder, "--lr", "-1"), ["--lr is -1"]),
                (("mlp", pairs, "-o", folder, "--batch", "0"), ["--batch is 0"]),
                (("linear", pairs, "-o", folder, "--ridge", "-1"), ["--ridge is -1"]),
                (("linear", pairs, "-o", folder, "--resume", "--overwrite"), ["--resume", "--overwrite"]),
                (("linear", pairs, "-o", folder, "--plot", "a", "--json", "a"), ["--plot", "--json"])):
            with self.subTest(arguments=arguments):
                self.fail_with(train(*arguments), *parts, code=2)
                self.assertFalse(folder.exists())
        self.fail_with(train("mlp", pairs, "-o", folder, "--epoch", "3"), "--epoch", "--epochs", code=2)
        self.fail_with(train("mlp", pairs, "-o", folder, "--lr", "1e30"), "layer", "diverged", "learning rate", code=1)

    def test_files(self):
        folder = self.folder / "s"
        self.fail_with(train("mlp", self.folder / "none.h5", "-o", folder), "none.h5", code=1)
        cut = self.folder / "cut.h5"
        raw = self.pairs.read_bytes()
        cut.write_bytes(raw[: len(raw) * 2 // 3])
        for ranks in (0, 2):
            self.fail_with(train("linear", cut, "-o", folder, ranks=ranks), "cut.h5", code=1)
        (self.folder / "text.h5").write_text("no HDF5\n" * 100)
        self.fail_with(train("linear", self.folder / "text.h5", "-o", folder), "text.h5", code=1)
        self.assertFalse(folder.exists())
        (self.folder / "file").write_text("x")
        self.fail_with(train("linear", self.pairs, "-o", self.folder / "file"), "not a folder", code=1)
        self.assertEqual((self.folder / "file").read_text(), "x")

    def test_a_folder_in_use_is_left_alone(self):
        folder = self.folder / "s"
        self.assertEqual(train("linear", self.pairs, "-o", folder).code, 0)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        for more in ((), ("--resume",)):
            self.fail_with(train("mlp", self.pairs, "-o", folder, *more), "not empty", "--overwrite", code=1)
            self.assertEqual({path.name: path.read_bytes() for path in folder.iterdir()}, before)
        self.assertEqual(train("mlp", self.pairs, "-o", folder, "--epochs", "1", "--overwrite").code, 0)
        self.check_surrogate(folder, 32)

    def test_a_full_disk(self):
        folder = self.folder / "s"
        self.assertEqual(train("linear", self.pairs, "-o", folder).code, 0)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}

        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            # Larger than MPI's own files, and smaller than a checkpoint with this many units.
            resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 20, 16 << 20))

        result = train("mlp", self.pairs, "-o", folder, "--overwrite", "--epochs", "2", "--hidden", "8192",
                       preexec_fn=limit)
        self.fail_with(result, "layer-0.safetensors", "too large", code=1)
        for name, content in before.items():
            self.assertEqual((folder / name).read_bytes(), content)
        self.assertEqual(list(folder.glob("**/*.tmp-*")), [])


if __name__ == "__main__":
    unittest.main()
