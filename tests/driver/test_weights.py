"""--weights: quantised weights in their blocks, unpacked, and made at load."""
import json
import os
import unittest

from harness import KVZAP, MODEL, SOURCE, TestCase, kvzap, read_safetensors, run_command, write_safetensors

LLAMA = SOURCE / "tests/golden/models/llama-random"  # 3 KV heads, q and k interleaved in GGUF files
QWEN = SOURCE / "tests/golden/models/qwen2-random"  # biases
IDS = [str(i * 37 % 1000) for i in range(70)]  # more tokens than some processors multiply as bytes
PROMPT = " ".join(IDS)


class Weights(TestCase):
    def quantised(self, model, kind):
        file = self.folder / f"{model.name}-{kind}.gguf"
        if not file.exists():
            done = run_command([KVZAP, "quantize", "-q", "-m", model, "-o", file, "--type", kind])
            self.assertEqual(done.code, 0, done)
        return file

    def run_model(self, model, *flags, new=12, tokens=IDS, **options):
        return self.dumped(model, tokens, *flags, new=new, **options)

    def test_blocks_give_the_logits_of_their_values(self):
        for model in (LLAMA, QWEN):
            for kind in ("Q8_0", "Q4_K_M", "Q5_1"):
                file = self.quantised(model, kind)
                for tokens in (IDS, IDS[:9]):
                    asked = dict(tokens=tokens, new=1)
                    _, exact = self.run_model(file, "--weights", "unpacked", "--dtype", "f32", **asked)
                    for ranks in (0, 2):
                        with self.subTest(model=model.name, kind=kind, ranks=ranks):
                            _, logits = self.run_model(file, "--dtype", "f32", ranks=ranks, **asked)
                            self.assert_near(logits, exact, 0.05)  # activations have 8 bits

    def test_instruction_sets_agree(self):
        file = self.quantised(LLAMA, "Q4_K_M")
        _, expected = self.run_model(file, "--dtype", "f32", new=1)
        for level in ("baseline", "avx2", "avx512", "avx512_bf16"):
            env = {**os.environ, "KVZAP_SIMD": level}
            if run_command([KVZAP, "--version"], env=env).code == 0:
                _, logits = self.run_model(file, "--dtype", "f32", env=env, new=1)
                self.assert_near(logits, expected, 0.05, level)

    def test_kernels_of_devices_agree(self):
        file = self.quantised(LLAMA, "Q4_K_M")
        for dtype in ("f16", "bf16"):  # products of other weights round their inputs to these
            _, expected = self.run_model(file, "--dtype", "f32", tokens=IDS[:9], new=1)
            for form in ("host", "device"):
                with self.subTest(dtype=dtype, form=form):
                    env = {**os.environ, "KVZAP_KERNELS": form}
                    _, logits = self.run_model(file, "--dtype", dtype, env=env, tokens=IDS[:9], new=1)
                    self.assert_near(logits, expected, 0.1)

    def test_quantising_at_load_is_quantising_before(self):
        for weights, kind in (("q8", "Q8_0"), ("q4", "Q4_K_M")):
            for ranks in (0, 2):
                with self.subTest(weights=weights, ranks=ranks):
                    at_load, logits = self.run_model(QWEN, "--weights", weights, ranks=ranks)
                    self.assertEqual(at_load["flags"]["weights"], weights)
                    before, expected = self.run_model(self.quantised(QWEN, kind), ranks=ranks)
                    self.assertEqual(at_load["memory"]["weight_bytes"], before["memory"]["weight_bytes"])
                    self.assertEqual(logits, expected)
        # Blocks of fewer bytes stay as they are.
        file = self.quantised(LLAMA, "Q4_K_M")
        self.assertEqual(self.run_model(file, "--weights", "q8")[0]["answers"][0]["ids"],
                         self.run_model(file)[0]["answers"][0]["ids"])

    def test_bytes_are_those_of_the_plan(self):
        kept = {}
        for flags in ([], ["--weights", "unpacked"], ["--weights", "q4"]):
            file = self.quantised(LLAMA, "Q8_0")
            for ranks in (0, 3):
                planned = kvzap("-m", file, "-c", 100, "--dry-run", "--json", "-", *flags, ranks=ranks)
                planned = json.loads(planned.text)
                report, _ = self.run_model(file, *flags, ranks=ranks)
                kept[tuple(flags), ranks] = report["memory"]["weight_bytes"]
                if "unpacked" not in flags:  # (quantised rows have padding)
                    self.assertEqual(planned["total"]["weight_bytes"], report["memory"]["weight_bytes"])
        self.assertLess(kept[(), 0], 0.56 * kept[("--weights", "unpacked"), 0])
        self.assertLess(kept[("--weights", "q4"), 0], 0.8 * kept[(), 0])

    def test_policies_and_surrogates_see_quantised_weights(self):
        """Policies that read the output projection; collecting of pairs."""
        file = self.quantised(LLAMA, "Q8_0")
        for policy in ("kvzip-plus", "knorm+critical"):
            kept = [self.report("-m", file, "--token-ids", "-p", PROMPT, "-n", 2, "--ignore-eos", "--window", 8,
                                "--policy", policy, "--evict-ratio", 0.5, "--weights", weights)["context"]["kept_rows"]
                    for weights in ("stored", "unpacked")]
            self.assertEqual(*(sum(map(sum, rows)) for rows in kept), policy)

    def test_random_weights_are_quantised_too(self):
        config = ["-m", LLAMA, "--random-weights", 3]
        small = self.report(*config, "--token-ids", "-p", "1 2 3", "-n", 2, "--ignore-eos", "--weights", "q8")
        whole = self.report(*config, "--token-ids", "-p", "1 2 3", "-n", 2, "--ignore-eos")
        self.assertLess(small["memory"]["weight_bytes"], 0.6 * whole["memory"]["weight_bytes"])

    def test_an_evaluation_goes_on_with_the_same_weights(self):
        command = [KVZAP, "eval", "-q", "-m", MODEL, "--tasks", SOURCE / "inputs/eval/recall-256.jsonl",
                   "--max-prompts", 1, "--policies", "none", "-o", self.folder / "eval"]
        for weights in ("q8", "q8"):
            done = run_command([*command, "--weights", weights])
            self.assertEqual(done.code, 0, done)
        self.fail_with(run_command(command), "weights")

    def test_errors(self):
        self.fail_with(kvzap("-m", LLAMA, "--token-ids", "-p", "1", "--weights", "q5"), "--weights", "q5")
        model = self.copy(LLAMA, "infinite")
        for file in model.glob("*.safetensors"):
            raw = file.read_bytes()
            file.write_bytes(raw[:-2] + b"\x80\x7f")  # an infinite bf16
        self.fail_with(kvzap("-m", model, "--token-ids", "-p", "1", "--weights", "q8"), "infinite", "cannot be quantised")



class Heads(TestCase):
    """As transformers 5, kvzap uses an lm_head.weight with other values than the embedding, whatever config.json says."""

    FLAGS = ("--token-ids", "-p", PROMPT, "-n", "6", "--ignore-eos", "--dtype", "f32")

    def run_both(self, *models, ranks=0):
        reports = []
        for model in models:
            result = self.succeed("-m", model, *self.FLAGS, "--json", "-", ranks=ranks)
            report = json.loads(result.out)
            reports.append((report["answers"][0]["ids"], report["memory"]["weight_bytes"]))
            warnings = [line for line in result.err.decode().splitlines() if "lm_head" in line]
            self.assertEqual(len(warnings), model is not models[0], result)
        self.assertEqual(*reports)
        return warnings

    def test_own_head(self):
        """Of llama-random, which has shards: config.json ties what the files do not."""
        tied = self.copy(LLAMA, "tied", tie_word_embeddings=True)
        for ranks in (0, 2):
            warning, = self.run_both(LLAMA, tied, ranks=ranks)
            self.assertRegex(warning, r"^kvzap: warning: .*/tied/model-.*safetensors: tensor lm_head.weight differs from "
                             "model.embed_tokens.weight: it is the output head, although config.json sets "
                             "tie_word_embeddings to true$")
        self.assertEqual(self.plan(tied).replace("tied", ""), self.plan(LLAMA).replace("llama-random", ""))
        for command, kind in (("convert", ()), ("quantize", ("--type", "Q8_0"))):
            files = [self.folder / command / f"{model.name}.gguf" for model in (LLAMA, tied)]
            files[0].parent.mkdir()
            for model, file in zip((LLAMA, tied), files):
                done = run_command([KVZAP, command, "-q", "-m", model, "-o", file, *kind])
                warnings = int(model is tied)
                self.assertEqual((done.code, done.err.count(b"tensor lm_head.weight differs from"), done.err.count(b"\n")),
                                 (0, warnings, warnings), done)
            reports = [self.report("-m", file, *self.FLAGS) for file in files]
            self.assertEqual(*(report["answers"][0]["ids"] for report in reports))
            self.assertEqual(*(report["memory"]["weight_bytes"] for report in reports))

    def test_same_head(self):
        """The same values beside the embedding, in the same and in another type, are no head of their own."""
        for dtype in ("BF16", "F32"):
            model = self.copy(MODEL, f"same-{dtype}")
            tensors = read_safetensors(model / "model.safetensors")
            kind, shape, head = tensors["model.embed_tokens.weight"]
            self.assertEqual(kind, "BF16")
            if dtype == "F32":
                head = b"".join(b"\0\0" + head[i:i + 2] for i in range(0, len(head), 2))
            write_safetensors(model / "model.safetensors", {**tensors, "lm_head.weight": (dtype, shape, head)})
            result = self.succeed("-m", model, *self.FLAGS, "--json", "-")
            self.assertNotIn(b"lm_head", result.err)
            self.assertEqual(json.loads(result.out)["memory"]["weight_bytes"],
                             self.report("-m", MODEL, *self.FLAGS)["memory"]["weight_bytes"])
            # One value of the last row.
            head = head[:-1] + bytes([head[-1] ^ 1])
            write_safetensors(model / "model.safetensors", {**tensors, "lm_head.weight": (dtype, shape, head)})
            self.assertIn(b"lm_head.weight differs", self.succeed("-m", model, *self.FLAGS).err)


if __name__ == "__main__":
    unittest.main()
