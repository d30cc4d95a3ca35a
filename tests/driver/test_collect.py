"""kvzap collect: counts, going on after any end, bad input; what it wrote is read by kvzap train."""
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import time
import unittest

from harness import HAVE_HDF5, KVZAP, MODEL, MPIEXEC, PATIENCE, TestCase, on_ranks, run_command

WORDS = "amber opal emerald garnet topaz jasper agate onyx pearl coral quartz beryl".split()


def collect(*arguments, ranks=0, **options):
    return run_command(on_ranks(ranks, [KVZAP, "collect", *arguments]), **options)


@unittest.skipUnless(HAVE_HDF5, "needs HDF5")
class CollectCase(TestCase):
    def setUp(self):
        super().setUp()
        self.texts = self.folder / "texts.jsonl"
        self.write_texts(12)

    def write_texts(self, count, words=150):
        lines = []
        for i in range(count):
            text = " ".join(WORDS[(i * j * j + j) % len(WORDS)] for j in range(1, words))
            lines.append(json.dumps({"text": f"{i}. {text}", "subset": "odd" if i % 2 else "even"}))
        self.texts.write_text("\n".join(lines) + "\n")

    def arguments(self, output, *more):
        options = {"-m": MODEL, "-f": self.texts, "-o": output, "--min-tokens": 20,
                   "--tokens-per-text": 60}
        for name in options.keys() & set(more):
            del options[name]
        return [part for option in options.items() for part in option] + list(more)

    def finish(self, output, *more, **options):
        result = collect(*self.arguments(output, "--json", "-", "-q", *more), **options)
        self.assertEqual(result.code, 0, result)
        self.assertEqual(result.err, b"")  # neither from the libraries that write the file
        report = json.loads(result.out)
        self.assertTrue(report["complete"])
        self.assertFalse(pathlib.Path(f"{output}.recovery").exists())
        return report

    def weights(self, pairs):
        """What ridge regression makes of all pairs: other pairs, other bytes."""
        folder = self.folder / f"{pathlib.Path(pairs).name}.surrogate"
        result = run_command([KVZAP, "train", "linear", pairs, "-o", folder, "--overwrite", "-q"])
        self.assertEqual(result.code, 0, result)
        return (folder / "model.safetensors").read_bytes()

    def fail_with(self, result, *parts, code=1):
        self.assertEqual(result.code, code, result)
        self.assertEqual(len(result.errors), 1, result)
        for part in parts:
            self.assertIn(str(part), result.errors[0])


class Collect(CollectCase):
    def test_report(self):
        with self.texts.open("a") as file:
            file.write('\n{"text": "short"}\n')
        file = self.folder / "pairs.h5"
        for ranks in (0, 2):
            file.unlink(missing_ok=True)
            report = self.finish(file, "--per-subset", 5, "--max-texts", 9, ranks=ranks)
            self.assertEqual(report["ranks"], max(1, ranks))
            self.assertEqual(report["texts"], 9)
            self.assertEqual(report["skipped"], {"too_short": 0, "too_long": 0,
                                                 "over_per_subset": 0, "over_max_texts": 4})
            self.assertEqual(report["this_run"]["pairs"], 9 * 60)
            self.assertEqual(report["this_run"]["non_finite_scores"], 0)
            self.assertEqual(report["file_bytes"], file.stat().st_size)
            self.assertLess(report["file_bytes"], 9 * 60 * 6 * (2 * 256 + 16) * 2)
        again = self.folder / "again.h5"
        report = self.finish(again, "--per-subset", 5)
        self.assertEqual(report["skipped"]["over_per_subset"], 2)
        self.assertEqual(report["skipped"]["too_short"], 1)

    def test_messages(self):
        file = self.folder / "pairs.h5"
        result = collect(*self.arguments(file, "--max-texts", 3))
        self.assertEqual((result.code, result.out), (0, b""), result)
        self.assertIn(b"3 of 12 texts; left out: 9 beyond --max-texts", result.err)
        self.assertIn(b"180 pairs of 3 texts in", result.err)
        before = file.read_bytes()
        result = collect(*self.arguments(file, "--max-texts", 3))
        self.assertEqual(result.code, 0, result)
        self.assertIn(b"there is nothing to do", result.err)
        self.assertEqual(file.read_bytes(), before)

    def test_value_types(self):
        sizes = {}
        for dtype in ("f32", "f16", "bf16"):
            file = self.folder / f"{dtype}.h5"
            sizes[dtype] = self.finish(file, "--dtype", dtype, "--max-texts", 2)["file_bytes"]
            self.weights(file)
        self.assertLess(sizes["bf16"], sizes["f32"])

    def test_compression(self):
        sizes = []
        for level in (0, 1, 9):
            file = self.folder / f"{level}.h5"
            sizes.append(self.finish(file, "--compression", level, "--max-texts", 4)["file_bytes"])
        self.assertLess(sizes[1], sizes[0])
        self.assertEqual(self.weights(self.folder / "0.h5"), self.weights(self.folder / "9.h5"))


class GoingOn(CollectCase):
    """The same pairs, however often and wherever it was ended."""

    expected = None  # the pairs of a run that nobody ended

    def setUp(self):
        super().setUp()
        self.write_texts(30, words=80)
        if GoingOn.expected is None:
            whole = self.folder / "whole.h5"
            self.finish(whole)
            GoingOn.expected = self.weights(whole)

    def interrupt(self, file, number, seconds, ranks=0, **environment):
        """Ends the command so long after it has begun to collect; returns its exit status."""
        command = on_ranks(ranks, [KVZAP, "collect", *map(str, self.arguments(file, "-q"))])
        process = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE,
                                   env={**os.environ, **environment})
        recovery = pathlib.Path(f"{file}.recovery")
        begin = time.monotonic()
        while not recovery.exists() and process.poll() is None:
            self.assertLess(time.monotonic() - begin, PATIENCE)
            time.sleep(0.005)
        time.sleep(seconds)
        process.send_signal(number)
        process.communicate(timeout=PATIENCE)
        return process.returncode

    def files_beside(self, file):
        """What MPI-IO leaves beside a file whose writer was killed."""
        return sorted(path.name for path in self.folder.glob(f"{file.name}-*"))

    def test_killed(self):
        file = self.folder / "pairs.h5"
        ends = [self.interrupt(file, signal.SIGKILL, 0.1 * i) for i in range(6)]
        self.assertIn(-signal.SIGKILL, ends)
        self.assertEqual(self.files_beside(file), [])
        self.finish(file)
        self.assertEqual(self.weights(file), self.expected)

    def test_killed_on_ranks(self):
        whole = self.folder / "whole2.h5"
        self.finish(whole, ranks=2)
        file = self.folder / "pairs.h5"
        for i in range(3):
            # As on several nodes, where Open MPI has lock files beside the file.
            self.interrupt(file, signal.SIGKILL, 0.2 * i, ranks=2, OMPI_MCA_sharedfp="lockedfile")
            time.sleep(1)  # mpiexec is gone; its ranks end as they notice
        foreign = self.folder / "pairs.h5-copy.lock"
        foreign.touch()
        self.finish(file, ranks=2)
        self.assertEqual(self.files_beside(file), [foreign.name])
        self.assertEqual(self.weights(file), self.weights(whole))

    def test_shortened(self):
        file = self.folder / "pairs.h5"
        begun, seconds = 0, 0.0
        while not 0 < begun < 29:
            file.unlink(missing_ok=True)
            self.interrupt(file, signal.SIGTERM, seconds)
            result = run_command([KVZAP, "train", "linear", file, "-o", self.folder / "few", "--overwrite"])
            found = re.search(r"from (\d+) of 30 texts", result.err.decode())
            begun = int(found[1]) if found else 30 if result.code == 0 else 0
            seconds = seconds / 2 if begun else 1.5 * seconds + 0.02
        weights = self.weights(file)
        result = collect(*self.arguments(file, "--max-texts", begun))
        self.assertEqual(result.code, 0, result)
        self.assertIn(f"{begun} of 30 texts, and {begun} are requested: there is nothing to do", result.err.decode())
        self.assertEqual(self.weights(file), weights)
        self.fail_with(collect(*self.arguments(file, "--max-texts", begun, "--seed", 7)), "--seed is 0, now 7")

        report = json.loads(collect(*self.arguments(file, "--max-texts", begun + 1, "--json", "-", "-q")).out)
        self.assertEqual((report["complete"], report["texts"], report["planned_texts"]), (True, begun + 1, begun + 1))
        self.assertFalse(pathlib.Path(f"{file}.recovery").exists())
        short = self.folder / "short.h5"
        self.finish(short, "--max-texts", begun + 1)
        self.assertEqual(self.weights(file), self.weights(short))
        # Now this is all of it.
        for more, text in ((begun + 1, "there is nothing to do"), (1, f"{begun + 1} texts, and 1 are requested")):
            self.assertIn(text, collect(*self.arguments(file, "--max-texts", more)).err.decode())
        self.fail_with(collect(*self.arguments(file)), f"the number of texts is {begun + 1}, now 30")

    def test_asked_to_end(self):
        # A new file for each signal: while its recovery file exists, the program handles signals,
        # and all its earlier texts are complete. mpiexec passes on SIGUSR1 unchanged.
        ends = [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGUSR1, 0)]
        if MPIEXEC:
            ends.append((signal.SIGUSR1, 2))
        for number, ranks in ends:
            file = self.folder / f"pairs-{number}-{ranks}.h5"
            self.assertEqual(self.interrupt(file, number, 0, ranks), 128 + number, (number, ranks))
            self.assertTrue(pathlib.Path(f"{file}.recovery").exists())
        for number, ranks in ends[1:3]:  # by the same command, whoever ended it before
            file = self.folder / f"pairs-{number}-{ranks}.h5"
            self.finish(file)
            self.assertEqual(self.weights(file), self.expected)


class BadInput(CollectCase):
    def check(self, *parts, more=(), ranks=(0, 2), code=1, **options):
        file = self.folder / "pairs.h5"
        for count in ranks:
            result = collect(*self.arguments(file, *more), ranks=count, **options)
            self.fail_with(result, *parts, code=code)
            self.assertFalse(file.exists())

    def test_options(self):
        for more, part in (
            (["--tokens-per-text", 0], "--tokens-per-text is 0"),
            (["--max-tokens", 5], "--max-tokens is 5"),
            (["--per-subset", 0], "--per-subset is 0"),
            (["--max-texts", -1], "--max-texts is -1"),
            (["--compression", 10], "--compression is 10"),
            (["--layers", 7], "--layers is 7"),
        ):
            self.check(part, more=more, ranks=[0], code=2)
        self.fail_with(collect("-m", MODEL), "no texts", code=2)
        self.fail_with(collect("-f", self.texts), "no model", code=2)

    def test_texts(self):
        for content, *parts in (
            ("", "there is no text in it"),
            ('{"text": "a"}\nwords\n', "texts.jsonl: line 2", "not valid JSON"),
            ('{"words": "a"}', "line 1: text: expected a string, found none"),
            ('{"text": "a b"}', "none of its texts can be used", "fewer than 20 tokens (--min-tokens): 1;"),
        ):
            self.texts.write_text(content)
            self.check(*parts)
        self.texts.unlink()
        self.check("texts.jsonl", "cannot be read")

    def test_template(self):
        model = self.copy(MODEL, "model")
        (model / "chat_template.jinja").write_text("{{ messages }}")
        result = collect(*self.arguments(self.folder / "pairs.h5", "-m", model))
        self.fail_with(result, "chat_template.jinja", "once and unchanged")
        self.assertNotIn("--raw", result.errors[0])

    def test_another_command(self):
        file = self.folder / "pairs.h5"
        self.finish(file, "--max-texts", 2)
        before = file.read_bytes()
        for more, part in (
            (["--max-texts", 3], "--max-texts is 2, now 3"),
            (["--max-texts", 2, "--seed", 1], "--seed is 0, now 1"),
            (["--max-texts", 2, "--dtype", "f32"], "dtype is bf16, now f32"),
            (["--max-texts", 2, "--layers", 2], "layers is 6, now 2"),
            (["--max-texts", 2, "--random-weights", 1], "the model's hash is"),
        ):
            for ranks in (0, 2):
                result = collect(*self.arguments(file, *more), ranks=ranks)
                self.fail_with(result, "was made by another command", part)
        self.write_texts(13)
        result = collect(*self.arguments(file, "--max-texts", 2))
        self.fail_with(result, "the texts' hash is")
        self.assertEqual(file.read_bytes(), before)

    def test_other_files(self):
        file = self.folder / "pairs.h5"
        file.write_text("mine")
        self.fail_with(collect(*self.arguments(file)), "pairs.h5", "H5Fopen failed")
        self.assertEqual(file.read_text(), "mine")
        self.fail_with(collect(*self.arguments(self.folder)), "not a regular file")
        self.fail_with(collect(*self.arguments(self.folder / "none" / "x")), "none")

    def test_truncated(self):
        file = self.folder / "pairs.h5"
        self.finish(file, "--max-texts", 2)
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2])
        self.fail_with(collect(*self.arguments(file, "--max-texts", 2)), "pairs.h5", "truncated")

    def test_full_disk(self):
        file = self.folder / "pairs.h5"
        whole = self.folder / "whole.h5"
        everything = ("--tokens-per-text", 1000)  # MPI itself needs files of 4 MiB
        size = self.finish(whole, *everything)["file_bytes"]

        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size * 2 // 3, size * 2 // 3))

        # Without mpiexec, which lets its ranks die of SIGXFSZ.
        result = collect(*self.arguments(file, *everything), preexec_fn=limit)
        self.fail_with(result, "pairs.h5", "no room for")
        # Once there is space, it continues.
        self.finish(file, *everything)
        self.assertEqual(self.weights(file), self.weights(whole))


if __name__ == "__main__":
    unittest.main()
