"""kvzap collect --query-statistics: a file that expected-attention takes, or none and why."""
import json
import signal
import struct
import subprocess
import time
import unittest

from harness import (CASES, KVZAP, MODEL, PATIENCE, TestCase, kvzap, on_ranks, read_safetensors,
                     run_command, write_safetensors)

WORDS = "amber opal emerald garnet topaz jasper agate onyx pearl coral quartz beryl".split()
LAYERS, QUERY_HEADS, DIM = 6, 8, 32
SINK = 4


def collect(*arguments, ranks=0, **options):
    return run_command(on_ranks(ranks, [KVZAP, "collect", *arguments]), **options)


class QueryStatisticsCase(TestCase):
    def setUp(self):
        super().setUp()
        self.texts = self.folder / "texts.jsonl"
        self.file = self.folder / "queries.safetensors"
        self.write_texts(12)

    def write_texts(self, count, words=60):
        lines = []
        for i in range(count):
            text = " ".join(WORDS[(i * j * j + j) % len(WORDS)] for j in range(1, words))
            lines.append(json.dumps({"text": f" {i}. {text}\n", "subset": "odd" if i % 2 else "even"}))
        self.texts.write_text("\n".join(lines) + "\n")

    def arguments(self, *more):
        options = {"-m": MODEL, "-f": self.texts, "--query-statistics": self.file, "--min-tokens": 20}
        for name in options.keys() & set(more):
            del options[name]
        return [part for option in options.items() for part in option] + list(more)

    def finish(self, *more, **options):
        result = collect(*self.arguments("--json", "-", "-q", *more), **options)
        self.assertEqual((result.code, result.err), (0, b""), result)
        return json.loads(result.out)

    def floats(self, name):
        dtype, _, data = read_safetensors(self.file)[name]
        self.assertEqual(dtype, "F32")
        return struct.unpack(f"<{len(data) // 4}f", data)

    def left_over(self):
        return sorted(path.name for path in self.folder.iterdir() if "queries" in path.name)

    def fail_with(self, result, *parts, code=1):
        self.assertEqual(result.code, code, result)
        self.assertEqual(len(result.errors), 1, result)
        for part in parts:
            self.assertIn(str(part), result.errors[0])


class QueryStatistics(QueryStatisticsCase):
    def test_file_and_report(self):
        expected = None
        for ranks in (0, 2, 4):
            report = self.finish("--per-subset", 5, "--max-texts", 9, "--dtype", "f32", ranks=ranks)
            self.assertEqual(report["ranks"], max(1, ranks))
            self.assertTrue(report["complete"])
            self.assertEqual((report["texts"], report["planned_texts"]), (9, 9))
            self.assertEqual(report["skipped"], {"too_short": 0, "too_long": 0,
                                                 "over_per_subset": 0, "over_max_texts": 3})
            self.assertEqual(report["tokens"], report["queries"] + 9 * SINK)
            self.assertEqual((report["layers"], report["query_heads"], report["head_dim"]),
                             (LAYERS, QUERY_HEADS, DIM))
            shapes = {name: shape for name, (_, shape, _) in read_safetensors(self.file).items()}
            self.assertEqual(shapes, {"query_mean": [LAYERS, QUERY_HEADS, DIM],
                                      "query_cov": [LAYERS, QUERY_HEADS, DIM, DIM]})
            found = self.floats("query_mean") + self.floats("query_cov")
            expected = expected or found
            for ours, first in zip(found, expected):
                self.assertLess(abs(ours - first), 1e-4)
            self.assertEqual(self.left_over(), [self.file.name])

    def test_covariance(self):
        self.finish("--dtype", "f32")
        covariance = self.floats("query_cov")
        for head in range(LAYERS * QUERY_HEADS):
            for i in range(DIM):
                of_head = covariance[head * DIM * DIM : (head + 1) * DIM * DIM]
                self.assertGreater(of_head[i * DIM + i], 0)
                for j in range(i):
                    self.assertLessEqual(abs(of_head[i * DIM + j] - of_head[j * DIM + i]), 1e-6)

    def test_sink_and_value_type_matter(self):
        seen = set()
        for more in ([], ["--sink", 0], ["--sink", 9], ["--dtype", "f32"], ["--dtype", "f16"]):
            report = self.finish(*more)
            sink = more[1] if more[:1] == ["--sink"] else SINK
            self.assertEqual((report["sink"], report["tokens"] - report["queries"]), (sink, 12 * sink))
            seen.add(self.floats("query_mean"))
        self.assertEqual(len(seen), 5)

    def test_run_takes_it(self):
        self.finish()
        policy = f"expected-attention:statistics={self.file}"
        run = ["-m", MODEL, "-p", CASES[0]["context"], "-n", 2, "--evict-ratio", 0.5, "--policy"]
        kept = []
        for flags in ([policy], ["expected-attention"]):
            for ranks in (0, 2):
                report = self.report(*run, *flags, ranks=ranks)
                self.assertGreater(report["context"]["evict_ratio"], 0.4)
                kept.append(report["context"]["kept_rows"])
        self.assertEqual(kept[0], kept[1])
        # Of a model with fewer layers.
        self.finish("--layers", 2)
        result = kvzap(*run, policy)
        self.assertEqual(result.code, 1, result)
        self.assertIn("query_mean", result.errors[0])

    def test_messages(self):
        result = collect(*self.arguments("--max-texts", 3))
        self.assertEqual((result.code, result.out), (0, b""), result)
        self.assertIn(b"3 of 12 texts; left out: 9 beyond --max-texts", result.err)
        self.assertIn(b"queries of 3 texts in", result.err)
        self.assertIn(b"wrote ", result.err)

    def test_asked_to_end(self):
        self.write_texts(400, words=400)
        self.file.write_bytes(b"mine")
        for ranks, number in ((0, signal.SIGTERM), (0, signal.SIGINT), (2, signal.SIGUSR1)):
            command = on_ranks(ranks, [KVZAP, "collect", *self.arguments()])
            process = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE)
            # From then on rank 0 looks out for signals.
            begin, seen = time.monotonic(), b""
            while b"400 of 400 texts" not in seen:
                self.assertLess(time.monotonic() - begin, PATIENCE)
                seen += process.stderr.readline()
            time.sleep(0.3)
            process.send_signal(number)
            _, rest = process.communicate(timeout=PATIENCE)
            self.assertEqual(process.returncode, 128 + number, rest)
            self.assertIn(f"stopped by signal {int(number)} after".encode(), rest)
            self.assertIn(b"queries.safetensors was not written", rest)
            self.assertEqual(self.file.read_bytes(), b"mine")
            self.assertEqual(self.left_over(), [self.file.name])


class BadInput(QueryStatisticsCase):
    def check(self, *parts, more=(), ranks=(0, 2), code=1, **options):
        for count in ranks:
            result = collect(*self.arguments(*more), ranks=count, **options)
            self.fail_with(result, *parts, code=code)
            self.assertEqual(self.left_over(), [])

    def test_options(self):
        for more, *parts in (
            (["-o", "pairs.h5"], "--output has no effect with --query-statistics"),
            (["--tokens-per-text", 500], "--tokens-per-text has no effect"),
            (["--seed", 0], "--seed has no effect"),
            (["--compression", 1], "--compression has no effect"),
            (["--sink", -1], "--sink is -1; expected at least 0"),
            (["--sink", 20], "--min-tokens is 20; expected more than --sink, 20"),
            (["--max-tokens", 5], "--max-tokens is 5"),
            (["--layers", 7], "--layers is 7"),
        ):
            self.check(*parts, more=more, ranks=[0], code=2)
        deck = self.folder / "deck.toml"
        deck.write_text("seed = 1\n")
        self.check("--seed has no effect", more=["--config", deck], code=2)
        pairs = self.folder / "pairs.h5"
        result = collect("-m", MODEL, "-f", self.texts, "-o", pairs, "--sink", 4)
        self.fail_with(result, "--sink has no effect without --query-statistics", code=2)
        result = collect("-m", MODEL, "-f", self.texts)
        self.fail_with(result, "no output: give", "-o", "--query-statistics", code=2)
        self.assertFalse(pairs.exists())

    def test_texts(self):
        for content, *parts in (
            ("", "there is no text in it"),
            ('{"text": "a"}\nwords\n', "texts.jsonl: line 2", "not valid JSON"),
            ('{"words": "a"}', "line 1: text: expected a string, found none"),
            ('{"text": "a b"}', "none of its texts can be used", "fewer than 20 tokens (--min-tokens): 1;"),
        ):
            self.texts.write_text(content)
            self.check(*parts)
        self.texts.write_text('{"text": "a"}')
        self.check("a covariance needs at least 2", more=["--min-tokens", 1, "--sink", 0])
        self.texts.unlink()
        self.check("texts.jsonl", "cannot be read")

    def test_unwritable(self):
        for target in (self.folder, self.folder / "none" / "x"):
            result = collect(*self.arguments("--query-statistics", target))
            self.fail_with(result, "--query-statistics", target)

    def test_queries_that_are_no_finite_numbers(self):
        model = self.copy(MODEL, "model")
        tensors = read_safetensors(model / "model.safetensors")
        name = "model.layers.1.self_attn.q_norm.weight"
        dtype, shape, data = tensors[name]
        self.assertEqual(dtype, "BF16")
        tensors[name] = dtype, shape, struct.pack("<f", 1e30)[2:] * (len(data) // 2)
        write_safetensors(model / "model.safetensors", tensors)
        self.check("the queries of layer 1 are not all finite", more=["-m", model, "--max-texts", 2])


if __name__ == "__main__":
    unittest.main()
