"""kvzap bench: its tables, what it says about eviction and memory, its decks, and bad input."""
import csv
import io
import json
import math
import os
import pathlib
import re
import statistics
import unittest

from harness import KVZAP, LINEAR, MLP, MODEL, SOURCE, TestCase, bench, kvzap, run_command

LAYERS, HEADS, DIM = 6, 4, 32
QUICK = ["-m", MODEL, "-r", "1", "--no-warmup"]
COLUMNS = (
    "version,revision,model,layers,weight_bytes,parameters,backend,concurrency,simd,ranks,dtype,kv_type,test,n_prompt,"
    "n_gen,depth,batch,evict_ratio,skew,threshold,evicted,prune,prefill,chunk,window,page_rows,read_pages,repetitions,"
    "tokens_per_second,tokens_per_second_stddev,ms_per_token,kv_live_bytes,kv_allocated_bytes,peak_rss_bytes,"
    "calls_per_step,call_bytes_per_step,call_seconds_per_step"
)


class BenchCase(TestCase):
    def succeed(self, *arguments, **options):
        result = bench(*arguments, **options)
        self.assertEqual(result.code, 0, result)
        self.assertEqual(result.errors, [], result)
        return result

    def json(self, *arguments, **options):
        result = self.succeed(*arguments, "-o", "json", "-q", **options)
        self.assertEqual(result.err, b"")
        report = json.loads(result.out)
        for row in report["results"]:
            self.check_row(report, row)
        return report

    def rows(self, *arguments, **options):
        return self.json(*arguments, **options)["results"]

    def check_row(self, report, row):
        kind, tokens = re.fullmatch(r"(pp|tg)(\d+)", row["test"]).groups()
        tokens = int(tokens)
        self.assertEqual((row["n_prompt"], row["n_gen"]), (tokens, 0) if kind == "pp" else (0, tokens))
        layers = report["model"]["layers"]
        self.assertEqual(row["full_rows"], layers * HEADS * row["batch"] * (row["depth"] + tokens))
        self.assertAlmostEqual(row["evicted"], 1 - row["kept_rows"] / row["full_rows"], places=12)
        width = 4 if report["options"]["dtype"] == "f32" else 2
        self.assertEqual(row["kv_live_bytes"], 2 * DIM * width * row["kept_rows"])
        self.assertGreaterEqual(row["kv_allocated_bytes"], row["kv_live_bytes"])
        self.assertGreater(row["peak_rss_bytes"], row["kv_allocated_bytes"])
        rates = row["samples_tokens_per_second"]
        self.assertEqual(len(rates), report["options"]["repetitions"])
        for seconds, rate in zip(row["samples_seconds"], rates):
            self.assertAlmostEqual(rate * seconds, tokens * row["batch"], places=6)
        self.assertAlmostEqual(row["tokens_per_second"] / statistics.mean(rates), 1)
        deviation = statistics.stdev(rates) if len(rates) > 1 else 0
        self.assertTrue(math.isclose(row["tokens_per_second_stddev"], deviation, rel_tol=1e-6, abs_tol=1e-6))
        milliseconds = 1e3 * statistics.mean(row["samples_seconds"]) / tokens
        self.assertAlmostEqual(row["ms_per_token"] / milliseconds, 1)


class Tables(BenchCase):
    LISTS = ["-p", "16,0", "-n", "3,2", "-d", "0,40", "--evict-ratio", "0,0.5", "--skew", "1,2"]

    def expected(self):
        """(test, depth, ratio, skew) in the order in which they run."""
        return [
            (test, depth, ratio, skew)
            for ratio, skews in ((0, [1]), (0.5, [1, 2]))
            for skew in skews
            for depth in (0, 40)
            for test in ("pp16", "tg3", "tg2")
        ]

    def test_markdown(self):
        for ranks in (0, 2):
            lines = self.succeed(*QUICK, *self.LISTS, "--columns", "all", ranks=ranks).text.splitlines()
            cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
            self.assertEqual(
                cells[0],
                ["model", "size", "params", "backend", "simd", "ranks", "dtype", "test", "depth", "batch", "evict ratio",
                 "skew", "evicted", "t/s", "ms/token", "KV live", "KV allocated", "peak RSS", "calls", "call bytes",
                 "call ms"])
            self.assertEqual(len({len(line) for line in lines}), 1, "columns are not aligned")
            self.assertTrue(all(re.fullmatch("-+:?", cell) for cell in cells[1]))
            rows = [dict(zip(cells[0], row)) for row in cells[2:]]
            self.assertEqual(
                [(r["test"], int(r["depth"]), float(r["evict ratio"]), float(r["skew"])) for r in rows],
                self.expected())
            for row in rows:
                self.assertEqual(row["model"], "recall-4m")
                self.assertEqual(row["ranks"], str(max(1, ranks)))
                self.assertRegex(row["t/s"], r"^\d+\.\d\d ± 0\.00$")
                self.assertEqual(row["params"], "4.39 M")
        header = self.succeed(*QUICK, "-p", "8", "-n", "1").text.splitlines()[0]
        self.assertNotIn("skew", header)
        self.assertNotIn("batch", header)

    def columns(self, *flags, **options):
        model = options.pop("model", MODEL)
        flags = ["-m", model, *QUICK[2:], "-p", "8", "-n", "1", *flags]
        lines = self.succeed(*flags, **options).text.splitlines()
        self.assertLessEqual(max(map(len, lines)), 120)
        self.assertEqual(len({len(line) for line in lines}), 1)
        return [cell.strip() for cell in lines[0].strip("|").split("|")]

    def test_columns(self):
        usual = ["model", "simd", "ranks", "test", "depth", "evicted", "t/s", "ms/token", "KV live", "peak RSS"]
        self.assertEqual(self.columns(), usual)
        # Columns that distinguish the rows come first.
        self.assertEqual(self.columns("-b", "1,2", "--evict-ratio", "0,0.5", "--skew", "1,2"),
                         ["model", "test", "depth", "batch", "evict ratio", "skew", "evicted", "t/s", "ms/token", "KV live"])
        long_name = self.copy(MODEL, "an-instruct-model-of-8B-parameters-with-a-long-name-and-then-some-more-letters-in-it")
        self.assertNotIn("model", self.columns(model=long_name))
        self.assertEqual(self.columns("--columns", "t/s,test,peak-rss,skew", ranks=2), ["t/s", "test", "peak RSS", "skew"])
        deck = self.folder / "deck.toml"
        deck.write_text('columns = ["test", "kv-allocated"]\n')
        self.assertEqual(self.columns("--config", deck), ["test", "KV allocated"])
        for flags, *parts in [
            (["--columns", "test,t/z"], "--columns: there is no column 't/z' (did you mean t/s?)", "peak-rss"),
            (["--columns", ""], "--columns: the list is empty"),
            (["--columns", "test,test"], "--columns names test twice"),
            (["--columns", "test", "-o", "csv"], "--columns is for the Markdown table; -o csv has all of them"),
        ]:
            self.fail_with(bench(*QUICK, *flags), *parts, code=2)

    def test_csv(self):
        out = self.succeed(*QUICK, *self.LISTS, "-o", "csv", "--dtype", "f32", ranks=2).text
        self.assertEqual(out.splitlines()[0], COLUMNS)
        rows = list(csv.DictReader(io.StringIO(out)))
        self.assertEqual(
            [(r["test"], int(r["depth"]), float(r["evict_ratio"]), float(r["skew"])) for r in rows],
            self.expected())
        for row in rows:
            self.assertEqual((row["ranks"], row["dtype"], row["layers"]), ("2", "f32", "6"))
            self.assertEqual(row["threshold"], "")
            self.assertEqual(row["parameters"], "4394624")
            self.assertGreater(float(row["tokens_per_second"]), 0)
            self.assertEqual(row["prefill"], "sparse" if float(row["evict_ratio"]) else "dense")
            self.assertEqual(row["prune"], "prefill" if float(row["evict_ratio"]) else "none")

    def test_json(self):
        for ranks in (0, 2):
            report = self.json("-m", MODEL, *self.LISTS, "-r", "3", "--seed", "7", ranks=ranks)
            self.assertEqual((report["format"], report["format_version"]), ("kvzap.bench", 1))
            self.assertEqual(
                [(r["test"], r["depth"], r["evict_ratio"], r["skew"]) for r in report["results"]],
                self.expected())
            self.assertEqual(report["model"]["parameters"], 4394624)
            self.assertEqual(report["options"]["seed"], 7)
            system = report["system"]
            self.assertEqual(system["ranks"], max(1, ranks))
            self.assertIn(system["simd"], ("baseline", "avx2", "avx512", "avx512_bf16", "amx_bf16", "amx_fp16"))
            self.assertRegex(system["kokkos"], r"^\d+\.\d+\.\d+$")
            for name in ("backend", "processor", "mpi", "compiler"):
                self.assertTrue(system[name])
            self.assertTrue(report["revision"])
        simd = self.json(*QUICK, "-p", "8", "-n", "1", env={**os.environ, "KVZAP_SIMD": "baseline"})
        self.assertEqual((simd["system"]["simd"], simd["system"]["byte_products"]), ("baseline", "portable"))
        self.assertIn(simd["system"]["byte_product_rows"], (32, None))

    def test_simd(self):
        """The instruction set that KVZAP_SIMD asks for is in every format."""
        flags = [*QUICK, "-p", "8", "-n", "1", "--columns", "test,simd"]
        for level in ("baseline", "avx2"):
            environment = {**os.environ, "KVZAP_SIMD": level}
            result = bench(*flags, env=environment)
            if level != "baseline" and b"this processor has" in result.err:
                continue
            cells = [line.split("|")[2].strip() for line in result.text.splitlines()]
            self.assertEqual([cells[0], *cells[2:]], ["simd", level, level])
            rows = csv.DictReader(io.StringIO(self.succeed(*flags[:-2], "-o", "csv", env=environment).text))
            self.assertEqual({row["simd"] for row in rows}, {level})
            self.assertRegex(run_command([KVZAP, "--version"], env=environment).text, rf"(?m)^instruction set +{level}$")
        result = bench(*flags, env={**os.environ, "KVZAP_SIMD": "sse9"})
        self.fail_with(result, 'KVZAP_SIMD is "sse9"', "baseline, avx2, avx512, avx512_bf16 or amx", code=1)

    def test_defaults(self):
        report = self.json("-m", MODEL, "-r", "1", "--no-warmup")
        self.assertEqual([(r["test"], r["depth"], r["batch"]) for r in report["results"]],
                         [("pp512", 0, 1), ("tg128", 0, 1)])
        self.assertEqual((report["options"]["dtype"], report["options"]["window"]), ("bf16", 128))

    def test_notes_and_quiet(self):
        result = self.succeed(*QUICK, "-p", "8", "-n", "0", "--layers", "2")
        self.assertIn("only the first 2 of 6 layers", result.err.decode())
        self.assertIn("recall-4m 2/6 layers", result.text)
        result = self.succeed(*QUICK, "-p", "8", "-n", "0", "--layers", "2", "-q")
        self.assertEqual(result.err, b"")
        bare = self.folder / "bare"
        bare.mkdir()
        (bare / "config.json").write_text((MODEL / "config.json").read_text())
        for ranks in (0, 2):
            result = self.succeed("-m", bare, "-p", "8", "-n", "1", "-r", "1", ranks=ranks)
            self.assertIn("the weights are random", result.err.decode())
        report = self.json("-m", bare, "-p", "8", "-n", "0")
        self.assertEqual((report["model"]["name"], report["model"]["random_weights"]), ("bare", 0))
        report = self.json(*QUICK, "-p", "8", "-n", "0", "--random-weights", "3")
        self.assertEqual(report["model"]["random_weights"], 3)
        self.assertNotIn("random_weights", self.json(*QUICK, "-p", "8", "-n", "0")["model"])

    def test_layers(self):
        whole = self.json(*QUICK, "-p", "8", "-n", "1")["model"]
        first = self.json(*QUICK, "-p", "8", "-n", "1", "--layers", "2", ranks=2)["model"]
        self.assertEqual((first["layers"], first["all_layers"]), (2, 6))
        # Embedding and final norm are left.
        rest = whole["parameters"] - (whole["parameters"] - first["parameters"]) * 6 // 4
        self.assertEqual(rest, 1024 * 256 + 256)

    def test_full_standard_output(self):
        if not pathlib.Path("/dev/full").exists():
            self.skipTest("no /dev/full")
        for output in ("md", "csv", "json"):
            with open("/dev/full", "wb") as full:
                result = bench(*QUICK, "-p", "8", "-n", "0", "-o", output, stdout=full)
                self.fail_with(result, "standard output: writing failed", code=1)


class Eviction(BenchCase):
    FLAGS = [*QUICK, "-p", "256", "-n", "8", "-d", "0,1000", "--window", "16"]

    def test_ratio_is_reached(self):
        for row in self.rows(*self.FLAGS, "--evict-ratio", "0,0.5,0.9", "--skew", "1,8"):
            with self.subTest(test=row["test"], depth=row["depth"], ratio=row["evict_ratio"], skew=row["skew"]):
                # Of the depth, or the prompt too, what has left the ring was judged.
                tokens = row["depth"] + row["n_prompt"]
                judged = max(0, tokens - 16) / (row["depth"] + row["n_prompt"] + row["n_gen"])
                self.assertAlmostEqual(row["evicted"], judged * row["evict_ratio"], delta=0.02)
                if row["evict_ratio"] == 0:
                    self.assertEqual(row["kept_rows"], row["full_rows"])
                self.assertLess(row["kv_allocated_bytes"],
                                row["kv_live_bytes"] + LAYERS * HEADS * (64 + 16) * 2 * DIM * 2 + (1 << 18))

    def test_neither_ranks_nor_prefill_nor_pages_change_what_is_kept(self):
        flags = [*self.FLAGS, "--evict-ratio", "0.5", "--skew", "4"]
        kept = [row["kept_rows"] for row in self.rows(*flags)]
        for more, ranks in ([], 2), (["--prefill", "dense"], 0), (["--chunk", "50"], 0), (["--page-rows", "7"], 4):
            self.assertEqual([row["kept_rows"] for row in self.rows(*flags, *more, ranks=ranks)], kept)
        self.assertNotEqual([row["kept_rows"] for row in self.rows(*flags, "--seed", "1")], kept)

    def test_repetitions_start_from_the_same_cache(self):
        flags = ["-m", MODEL, "-p", "100", "-n", "40", "-d", "300", "--window", "16", "--evict-ratio", "0.5",
                 "--prune", "always"]
        once = self.rows(*flags, "-r", "1", "--no-warmup")
        often = self.rows(*flags, "-r", "3")
        self.assertEqual([row["kept_rows"] for row in once], [row["kept_rows"] for row in often])

    def test_prune(self):
        flags = [*QUICK, "-p", "0", "-n", "200", "--window", "1", "--evict-ratio", "0.5"]
        (row,) = self.rows(*flags)
        self.assertEqual((row["evicted"], row["prune"]), (0, "prefill"))
        (row,) = self.rows(*flags, "--prune", "always")
        self.assertAlmostEqual(row["evicted"], 0.5, delta=0.05)
        self.assertEqual(row["prune"], "always")

    def test_batch(self):
        flags = [*QUICK, "-p", "16", "-n", "4", "-d", "500", "-b", "3,1,2", "--evict-ratio", "0.5"]
        for ranks in (0, 2):
            prompt, *rows = self.rows(*flags, ranks=ranks)
            self.assertEqual((prompt["test"], prompt["batch"]), ("pp16", 1))
            self.assertEqual([row["batch"] for row in rows], [3, 1, 2])
            one = rows[1]["kept_rows"]
            self.assertEqual([row["kept_rows"] for row in rows], [3 * one, one, 2 * one])
            self.assertLess(rows[1]["kv_allocated_bytes"], rows[2]["kv_allocated_bytes"])

    def test_surrogate(self):
        flags = [*QUICK, "-p", "64", "-n", "4", "-d", "0,200", "--window", "16"]
        for ranks in (0, 2):
            report = self.json(*flags, "--surrogate", MLP, "--threshold", "-4", ranks=ranks)
            self.assertEqual(report["surrogate"], {"path": str(MLP), "kind": "mlp", "threshold": -4})
            self.assertEqual(len(report["results"]), 4)
            for row in report["results"]:
                self.assertNotIn("evict_ratio", row)
                if row["depth"] or row["n_prompt"]:
                    self.assertTrue(0.02 < row["evicted"] < 0.9, row)
        for threshold, share in ("-inf", 0), ("inf", 1):
            report = self.json(*flags, "--surrogate", LINEAR, "--threshold", threshold, "--layers", "3")
            self.assertEqual(report["surrogate"]["threshold"], threshold)
            for row in report["results"]:
                judged = max(0, row["depth"] + row["n_prompt"] - 16)
                self.assertEqual(row["full_rows"] - row["kept_rows"], share * judged * 3 * HEADS)


class Deck(BenchCase):
    def deck(self, text):
        file = self.folder / "deck.toml"
        file.write_text(text)
        return file

    def test_lists(self):
        deck = self.deck(f"""
            model = "{MODEL}"
            n-prompt = [8, 16]
            n-gen = "2,3"
            n-depth = 5
            evict-ratio = [0, 0.25]
            repetitions = 2
            warmup = false
            output = "json"
            quiet = true
            """)
        for ranks in (0, 2):
            report = json.loads(self.succeed("--config", deck, ranks=ranks).out)
            self.assertEqual([(r["test"], r["depth"], r["evict_ratio"]) for r in report["results"]],
                             [(t, 5, e) for e in (0, 0.25) for t in ("pp8", "pp16", "tg2", "tg3")])
            self.assertEqual((report["options"]["repetitions"], report["options"]["warmup"]), (2, False))
        report = json.loads(self.succeed("--config", deck, "-p", "4", "-n", "1", "-d", "0", "-p", "6,7").out)
        self.assertEqual([(r["test"], r["depth"]) for r in report["results"][:4]],
                         [("pp4", 0), ("pp6", 0), ("pp7", 0), ("tg1", 0)])

    def test_errors(self):
        for text, *parts in [
            ("n-promt = 3", ":1: n-promt: unknown key", "'n-prompt'"),
            ("question = 'x'", "question: unknown key"),
            ("config = 'x'", "config: belongs on the command line"),
            ("window = [1, 2]", "expected one value, found a list"),
            ("n-prompt = []", "n-prompt: the list is empty"),
            ("n-prompt = [[1]]", "expected a text, a number"),
            ("n-prompt = true", "expected a text or a number"),
            ("warmup = 1", "expected true or false"),
            ("output = 'xml'", "xml not in {md,csv,json}"),
        ]:
            with self.subTest(deck=text):
                deck = self.deck(text)
                self.fail_with(bench("--config", deck), deck, *parts, code=2)
        deck = self.deck(f"model = '{MODEL}'\nn-prompt = [8, 'x']")
        self.fail_with(bench("--config", deck), "-p has the entry 'x'", code=2)


class BadInput(BenchCase):
    def test_folders(self):
        self.fail_with(bench("-m", MODEL, "--surrogate", MODEL, "--threshold", "1"), "architectures: expected")
        self.fail_with(bench("-m", self.folder / "none"), self.folder / "none" / "config.json", code=1)

    def test_on_several_ranks(self):
        self.fail_with(bench("-m", MODEL, "-p", "8,x", ranks=3), "-p has the entry 'x'", code=2)

    def test_too_little_memory(self):
        for flags in (["-d", "1000000000"], ["-p", "1000000000"], ["-b", "65536", "-d", "1000000"]):
            self.fail_with(bench("-m", MODEL, *flags, ranks=2), "not enough memory", "2 ranks", code=1)
        flags = ["-m", SOURCE / "inputs/configs/Llama-65B", "-p", "0", "-n", "1"]
        self.fail_with(bench(*flags, "-d", "10000000"), "not enough memory", "tg1 at depth 10000000", code=1)

    def test_checkpoint(self):
        model = self.copy(MODEL, "model")
        (model / "model.safetensors").write_bytes(b"bad")
        self.fail_with(bench("-m", model, ranks=2), model / "model.safetensors", code=1)


class Layers(TestCase):
    """kvzap run --layers."""

    ASK = ["-m", MODEL, "--token-ids", "-p", " ".join(map(str, range(1, 101))), "-n", "4"]

    def test_first_layers(self):
        whole = self.report(*self.ASK)
        self.assertNotIn("all_layers", whole["model"])
        same = self.report(*self.ASK, "--layers", "6")
        self.assertEqual(same["answers"][0]["ids"], whole["answers"][0]["ids"])
        ids = []
        for ranks in (0, 2):
            part = self.report(*self.ASK, "--layers", "2", "--dtype", "f32", ranks=ranks)
            self.assertEqual((part["model"]["layers"], part["model"]["all_layers"]), (2, 6))
            self.assertEqual(len(part["context"]["kept_rows"]), 2)
            ids.append(part["answers"][0]["ids"])
        self.assertEqual(ids[0], ids[1])
        result = self.succeed(*self.ASK, "--layers", "2", "--random-weights", "1")
        self.assertIn("only the first 2 of 6 layers", result.err.decode())

    def test_surrogate_and_placement(self):
        flags = [*self.ASK, "--surrogate", MLP, "--threshold", "-4", "--window", "8", "--layers", "3",
                 "--dtype", "f32"]
        one = self.report(*flags)
        self.assertGreater(one["context"]["evict_ratio"], 0)
        file = self.folder / "run.json"
        file.write_text(json.dumps(one))
        two = self.report(*flags, "--placement", file, ranks=2)
        self.assertEqual(two["context"]["kept_rows"], one["context"]["kept_rows"])

    def test_dry_run_and_errors(self):
        plan = json.loads(self.succeed(*self.ASK, "--layers", "2", "--dry-run", "--json", "-", "-q").out)
        whole = json.loads(self.succeed(*self.ASK, "--dry-run", "--json", "-", "-q").out)
        self.assertEqual(3 * plan["total"]["kv_full_bytes"], whole["total"]["kv_full_bytes"])
        for layers in ("0", "-1", "7"):
            self.fail_with(kvzap(*self.ASK, "--layers", layers), f"--layers is {layers}", "1 to 6")


class Help(TestCase):
    def test_every_option_is_there(self):
        source = (SOURCE / "drivers/options/bench_options.cpp").read_text()
        declared = re.findall(r'add_(?:option|flag|list|texts)\(\s*(?:app,\s*)?"([^"]+)"', source)
        self.assertGreater(len(declared), 19)
        names = {name.lstrip("!") for declaration in declared for name in declaration.split(",")}
        shared = re.findall(r"declare_(\w+)\(\s*app, o\.", source)  # by options.cpp, for several commands
        flags_of = {"rope": {"--rope-scaling", "--rope-scale"}, "threads": {"-t", "--threads"}}
        for name in shared:
            names |= flags_of.get(name, {"--" + name.replace("_", "-")})
        for flag in ("--help", "-h"):
            result = run_command([KVZAP, "bench", flag])
            self.assertEqual((result.code, result.err), (0, b""), result)
            words = set(re.findall(r"(?<![\w-])-{1,2}[a-z][a-z-]*", result.text))
            self.assertEqual(words, names | {"-h", "--help"})
        for flag, default in (("n-prompt LIST", "512"), ("n-gen LIST", "128"), ("n-depth LIST", "0"),
                              ("batch LIST", "1"), ("evict-ratio LIST", "0"), ("skew LIST", "1"),
                              ("repetitions INT", "5"), ("output md|csv|json", "md"), ("dtype f32|bf16|f16", "bf16"),
                              ("window TOKENS", "128"), ("chunk INT", "2048"), ("page-rows INT", "64"),
                              ("seed INT", "0")):
            entry = re.search(rf"(?ms)--{re.escape(flag)}\s+(.*?)(?=^\s+(?:-\w, |    )--|^$|\Z)", result.text)
            self.assertIn(f"default: {default}", re.sub(r"\s+", " ", entry.group(1)), flag)


if __name__ == "__main__":
    unittest.main()
