"""What a pruned cache takes: pages against rows, and what the system says about the whole process."""
import json
import pathlib
import random
import re
import struct
import unittest

from harness import KVZAP, MODEL, SOURCE, TestCase, run_command, write_safetensors

LAYERS, HIDDEN, HEADS, DIM = 2, 128, 2, 128
TOKENS = 8192


class Memory(TestCase):
    def setUp(self):
        super().setUp()
        self.model = self.folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
            "hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": LAYERS,
            "num_attention_heads": 2, "num_key_value_heads": HEADS, "head_dim": DIM,
            "vocab_size": 512, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "tie_word_embeddings": True,
        }))
        numbers = random.Random(5)
        self.surrogate = self.folder / "surrogate"
        self.surrogate.mkdir()
        (self.surrogate / "config.json").write_text(json.dumps({
            "model_type": "kvzap", "input_dim": HIDDEN, "output_dim": HEADS, "n_modules": LAYERS,
            "hidden_dim": None,
        }))
        tensors = {}
        for layer in range(LAYERS):
            values = [numbers.gauss(0, 1) for _ in range(HEADS * HIDDEN)]
            tensors[f"layers.{layer}.weight"] = (
                "F32", [HEADS, HIDDEN], struct.pack(f"<{len(values)}f", *values))
            tensors[f"layers.{layer}.bias"] = ("F32", [HEADS], bytes(4 * HEADS))
        write_safetensors(self.surrogate / "model.safetensors", tensors)
        self.ids = self.folder / "ids"
        self.ids.write_text(" ".join(str(numbers.randrange(512)) for _ in range(TOKENS)))

    def flags(self, threshold, prefill="sparse"):
        return ["-m", self.model, "--random-weights", "1", "--token-ids", "-f", self.ids, "-n", "4",
                "--question", "1 2 3", "--surrogate", self.surrogate, "--threshold", threshold,
                "--ignore-eos", "--prefill", prefill, "--chunk", "1024"]

    def threshold(self, ratio):
        """By bisection, on the first ids alone."""
        ids, self.ids = self.ids, self.folder / "few"
        self.ids.write_text(" ".join(ids.read_text().split()[:1024]))
        low, high = -60.0, 60.0
        for _ in range(12):
            middle = (low + high) / 2
            found = self.report(*self.flags(middle), "--window", "1")["context"]["evict_ratio"]
            low, high = (middle, high) if found < ratio else (low, middle)
        self.ids = ids
        return high

    def test_pages_hold_little_but_rows(self):
        threshold = self.threshold(0.77)
        for ranks in (1, 2):
            for prefill, *more in (
                ["sparse"],
                ["dense"],
                ["sparse", "--prune", "always"],
            ):
                report = self.report(*self.flags(threshold, prefill), *more, ranks=ranks)
                for cache in (report["context"], report["answers"][0]["cache"]):
                    kv = cache["kv"]
                    self.assertAlmostEqual(cache["evict_ratio"], 0.75, delta=0.05)
                    self.assertLessEqual(kv["allocated_bytes"], 1.1 * kv["live_bytes"])
                    self.assertLess(kv["peak_allocated_bytes"], kv["full_bytes"])

    def test_peak_resident_memory(self):
        timer = pathlib.Path("/usr/bin/time")
        if not timer.exists():
            self.skipTest("no /usr/bin/time")
        command = [timer, "-v", KVZAP, "run", *self.flags(0), "-q", "--json", "-"]
        result = run_command(command)
        self.assertEqual(result.code, 0, result)
        memory = json.loads(result.out)["memory"]
        found = re.search(r"Maximum resident set size \(kbytes\): (\d+)", result.err.decode())
        if not found:
            self.skipTest("/usr/bin/time is not GNU time")
        self.assertEqual(memory["peak_rss_bytes"], sum(memory["peak_rss_bytes_per_rank"]))
        self.assertAlmostEqual(memory["peak_rss_bytes"] / (1024 * int(found.group(1))), 1, delta=0.1)

    def test_pruning_lowers_the_peak_of_sparse_prefill(self):
        peaks = [
            self.report(*self.flags(threshold))["context"]["kv"]["peak_allocated_bytes"]
            for threshold in ("-inf", "inf")
        ]
        self.assertLess(peaks[1], 0.3 * peaks[0])


class LittleAddressSpace(TestCase):
    """A process that gets no more memory says so and ends, whatever the libraries' threads wait for."""

    ERROR = r"\Akvzap: error: [^\n]*(memory|weights|no such file|cannot (start|be mapped))[^\n]*\n\Z"

    def test_ends_with_one_error(self):
        texts = self.folder / "texts.jsonl"
        texts.write_text(json.dumps({"text": 20 * "amber opal emerald garnet topaz "}) + "\n")
        for megabytes in (144, 176, 192, 256, 288, 320, 352, 400):
            for arguments in (
                ["serve", "-m", self.folder / "none", "--port", "0", "-t", "1"],
                ["run", "-m", MODEL, "-p", "Hello", "-n", "4", "-t", "1", "-q"],
                ["eval", "-m", MODEL, "--tasks", SOURCE / "inputs/eval/recall-256.jsonl", "--max-prompts", "1",
                 "--policies", "none", "-o", self.folder / f"eval{megabytes}", "-q"],
                ["collect", "-m", MODEL, "-f", texts, "--min-tokens", "20", "-o",
                 self.folder / f"pairs{megabytes}.h5", "-q"],
            ):
                with self.subTest(megabytes=megabytes, command=arguments[0]):
                    limit = f'ulimit -v {megabytes * 1024} && exec "$@"'
                    result = run_command(["bash", "-c", limit, "bash", KVZAP, *map(str, arguments)], timeout=60)
                    # Open MPI may fail before kvzap, and names plug-ins that it cannot map. Its
                    # thread's libevent warns until the process ends. Its texts may have any bytes.
                    lines = result.err.decode(errors="replace").splitlines(keepends=True)
                    others = ("mca_base_component", "[warn] realloc", "OPAL ERROR")
                    error = "".join(line for line in lines if not any(other in line for other in others))
                    self.check_end(result, error, megabytes)

    def check_end(self, result, error, megabytes):
        """The exit status is 0, or 1 with one error; Open MPI may fail in its own ways while it starts."""
        if self.is_of_mpi(error) or (megabytes < 192 and "kvzap: error" not in error):
            return
        self.assertIn(result.code, (0, 1), result)
        if result.code == 1:
            self.assertRegex(error, self.ERROR)
            self.assertLess(len(error), 250)

    def is_of_mpi(self, error):
        """Whether Open MPI has ended the process itself, before kvzap has begun."""
        own = ("ompi_mpi_init", "MPI_Init_thread", "opal_show_help_yylex")
        return "kvzap: error" not in error and any(text in error for text in own)

    def starts(self, megabytes):
        return run_command(["bash", "-c", f"ulimit -v {megabytes * 1024} && exec {KVZAP} -V"]).code == 0

    def test_threads_end_with_one_error(self):
        """OpenMP's threads are the last that need room: somewhere in this range they get none."""
        # MPI reserves more on nodes with more cores.
        least = next(megabytes for megabytes in range(96, 4096, 16) if self.starts(megabytes))
        for megabytes in range(least + 32, least + 104, 4):
            with self.subTest(megabytes=megabytes):
                limit = f'ulimit -v {megabytes * 1024} && exec "$@"'
                result = run_command(["bash", "-c", limit, "bash", KVZAP, "run", "-m", MODEL, "-p", "Hello", "-n", "2",
                                      "-t", "3", "-q"], timeout=60)
                lines = result.err.decode(errors="replace").splitlines(keepends=True)
                error = "".join(line for line in lines if "mca_base_component" not in line and "realloc" not in line)
                if self.is_of_mpi(error):
                    continue
                self.assertIn(result.code, (0, 1), result)
                if result.code == 1:
                    self.assertRegex(error, self.ERROR)


if __name__ == "__main__":
    unittest.main()
