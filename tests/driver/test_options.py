"""Prompts as text, ids, files and standard input; sampling; decks; dry runs; help; output files."""
import json
import os
import pathlib
import re
import subprocess
import unittest

from harness import (CASES, HAVE_HDF5, KVZAP, MLP, MODEL, MPIEXEC, SOURCE, TestCase, kvzap, on_ranks,
                     run_command)

CASE = CASES[0]
CONTEXT = CASE["context"]
QUESTION = CASE["question"]
GOLDEN = CASE["runs"]["full"]["text"]
ASK = ["-m", MODEL, "-p", CONTEXT, "--question", QUESTION, "--dtype", "f32"]


class Prompt(TestCase):
    def tokens(self, *arguments, **options):
        report = self.report("-m", MODEL, "-n", "1", *arguments, **options)
        return report["context"]["tokens"], report["answers"][0]["question_tokens"]

    def test_token_ids(self):
        ids = " ".join(str(7 * i % 1000) for i in range(50))
        text = self.report(*ASK, "-n", "16")
        self.assertEqual(text["answers"][0]["text"], GOLDEN)
        result = self.succeed("-m", MODEL, "--token-ids", "-p", ids, "-n", "5", "--ignore-eos", "-q")
        printed = [int(word) for word in result.text.split()]
        self.assertEqual(len(printed), 5)
        file = self.folder / "ids"
        file.write_text("\n\t " + ids.replace(" ", "\n") + "\n")
        flags = ["-m", MODEL, "--token-ids", "-n", "5", "--ignore-eos"]
        for ranks in (1, 2):
            report = self.report(*flags, "-f", file, ranks=ranks)
            self.assertEqual(report["answers"][0]["ids"], printed)
        # The last of the ids as a question: the same positions, in two steps.
        split = self.report(*flags, "-p", ids.rsplit(" ", 3)[0], "--question",
                            " ".join(ids.split()[-3:]), "--dtype", "f32")
        whole = self.report(*flags, "-p", ids, "--dtype", "f32")
        self.assertEqual(split["answers"][0]["ids"], whole["answers"][0]["ids"])
        self.assertEqual(split["context"]["tokens"], 47)
        self.assertEqual(split["answers"][0]["question_tokens"], 3)

    def test_round_trip_of_ids(self):
        vocabulary = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]
        word = "ab"  # bytes stand for themselves where there is no merge
        letters = [vocabulary[letter] for letter in word]
        joined = vocabulary.get(word)
        ids = [joined] if joined is not None else letters
        by_text = self.report("-m", MODEL, "--raw", "-p", word, "-n", "8", "--dtype", "f32")
        by_ids = self.report("-m", MODEL, "--token-ids", "-p", " ".join(map(str, ids)), "-n", "8",
                             "--dtype", "f32")
        self.assertEqual(by_text["answers"][0]["ids"], by_ids["answers"][0]["ids"])
        self.assertEqual(
            [int(word) for word in by_ids["answers"][0]["text"].split()], by_ids["answers"][0]["ids"]
        )

    def test_file_and_standard_input(self):
        file = self.folder / "context"
        file.write_bytes(CONTEXT.encode())
        common = ["-m", MODEL, "--question", QUESTION, "--dtype", "f32", "-q"]
        for ranks in (0, 2):
            for flags, stdin in ([["-f", file], b""], [["-f", "-"], CONTEXT.encode()]):
                result = self.succeed(*common, *flags, stdin=stdin, ranks=ranks)
                self.assertEqual(result.text, GOLDEN + "\n")
                self.assertEqual(result.err, b"")

    def test_nothing_is_stripped(self):
        file = self.folder / "context"
        file.write_bytes(b"one two")
        plain, _ = self.tokens("--raw", "-f", file)
        for text in (b"one two\n\n", b"\n\none two", b"one two\n\n\n\n\n \t \n"):
            file.write_bytes(text)
            longer, _ = self.tokens("--raw", "-f", file)
            self.assertGreater(longer, plain)
            self.assertEqual(self.tokens("-f", file), self.tokens("-p", text.decode()))
        file.write_bytes(b"one\0two")
        self.fail_with(kvzap("-m", MODEL, "--raw", "-f", file), "binary data (byte 4 is 0)")

    def test_raw_has_no_template(self):
        raw, raw_question = self.tokens("--raw", "-p", "one two", "--question", "three")
        chat, chat_question = self.tokens("-p", "one two", "--question", "three")
        self.assertGreater(chat, raw)
        self.assertGreater(chat_question, raw_question)
        self.assertEqual(self.tokens("--raw", "-p", "one two"), (raw, 0))

    def test_template_that_trims_its_message(self):
        model = self.copy(MODEL, "trims")
        file = model / "chat_template.jinja"
        plain = file.read_text()
        file.write_text(plain.replace("message['content']", "message['content'] | trim"))
        self.assertNotEqual(file.read_text(), plain)

        def tokens(context, *questions):
            flags = [flag for question in questions for flag in ("--question", question)]
            report = self.report("-m", model, "-p", context, *flags, "-n", "0")
            return report["context"]["tokens"], report["answers"][0]["question_tokens"]

        # Only where the message begins: at the end of the context the message continues, and
        # questions are used unchanged, as in kvpress' pipeline.
        self.assertEqual(tokens(" \n one two"), tokens("one two"))
        self.assertEqual(tokens("\t one two", "three"), tokens("one two", "three"))
        self.assertNotEqual(tokens("one two \n\n", "three"), tokens("one two", "three"))
        self.assertNotEqual(tokens("one two \n\n"), tokens("one two"))
        self.assertNotEqual(tokens("one two", "three \n\n"), tokens("one two", "three"))

    def test_text_files(self):
        file = self.folder / "context"
        expected = self.tokens("-p", "one\ntwo\nthree", "--raw")
        file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree")
        self.assertEqual(self.tokens("-f", file, "--raw"), expected)

    def test_separator(self):
        """A blank line, unless white space is there."""
        def ids(*flags, question="two?"):
            report = self.report("-m", MODEL, "--question", question, "-n", "0", "--json-token-ids", *flags)
            return report["context"]["ids"], report["answers"][0]["question_ids"]

        plain, parted = ids("-p", "one."), ids("-p", "one.", question="\n\ntwo?")
        self.assertEqual(plain, parted)
        none = ids("-p", "one.", "--separator", "")
        self.assertEqual(none[0], plain[0])
        self.assertNotEqual(none[1], plain[1])
        self.assertEqual(ids("-p", "one.\n")[1], none[1])
        self.assertEqual(ids("-p", "one.", "--separator", "\n\n")[1], plain[1])
        self.fail_with(kvzap("-m", MODEL, "-p", "one.", "--question", "two?", "--raw", "--separator", "x"),
                       "--separator has no effect with --raw", code=2)

    def test_several_files(self):
        one, two, ends = (self.folder / name for name in ("one", "two", "ends"))
        one.write_text("one"), two.write_text("two"), ends.write_text("end\n")
        tokens = lambda *files: self.tokens(*(flag for file in files for flag in ("-f", file)), "--raw")
        self.assertEqual(tokens(one, two), self.tokens("-p", "one\n\ntwo", "--raw"))
        self.assertEqual(tokens(ends, two), self.tokens("-p", "end\ntwo", "--raw"))

    def test_questions_file(self):
        file = self.folder / "questions"
        file.write_text("What?\r\n\n  Why? \n")
        flags = ["-m", MODEL, "-p", "one two", "--question", "Who?", "--questions", file, "-n", "1"]
        report = self.report(*flags, ranks=2)
        self.assertEqual([answer["question"] for answer in report["answers"]], ["Who?", "What?", "Why?"])
        # The recorded flags are a deck that asks the same.
        flags = report["flags"]
        self.assertEqual((flags["question"], flags["questions"]), (["Who?", "What?", "Why?"], None))

    def test_piped_input(self):
        expected = self.tokens("-p", "one two", "--raw")
        self.assertEqual(self.tokens("--raw", stdin=b"one two"), expected)
        self.assertEqual(self.tokens("-p", "one two", "--raw", stdin=b"more"), expected)
        self.fail_with(kvzap("-m", MODEL, "-f", "-", "--questions", "-"), "standard input", "more than once")
        # An open pipe must not be read if a prompt is given.
        read, write = os.pipe()
        try:
            result = subprocess.run([KVZAP, "run", "-m", MODEL, "-p", "one", "-n", "1", "-q"], stdin=read,
                                    stdout=subprocess.PIPE, timeout=600)
            self.assertEqual(result.returncode, 0)
        finally:
            os.close(read), os.close(write)


class Generation(TestCase):
    def test_number_of_tokens(self):
        for count in (0, 1, 3):
            for ranks in (0, 2):
                report = self.report(*ASK, "-n", count, ranks=ranks)
                (answer,) = report["answers"]
                self.assertEqual(len(answer["ids"]), count)
                self.assertEqual(answer["new_tokens"], count)
                self.assertEqual(answer["stop_reason"], "max_new_tokens")
                tokens = CASE["n_context"] + answer["question_tokens"] + max(0, count - 1)
                self.assertEqual(answer["cache"]["tokens"], tokens)
        self.assertEqual(self.succeed(*ASK, "-n", "0").text, "\n")

    def test_ignore_eos(self):
        stopped = self.report(*ASK)["answers"][0]
        self.assertEqual(stopped["stop_reason"], "stop_id")
        onward = self.report(*ASK, "-n", "30", "--ignore-eos")["answers"][0]
        self.assertEqual(onward["stop_reason"], "max_new_tokens")
        self.assertEqual(len(onward["ids"]), 30)
        self.assertEqual(onward["ids"][: len(stopped["ids"])], stopped["ids"])

    def test_sampling(self):
        def draw(*flags, ranks=0):
            flags = ["--temp", "2", "-n", "12", "--ignore-eos", *flags]
            return self.report(*ASK, *flags, ranks=ranks)["answers"][0]["ids"]

        first = draw("--seed", "1")
        self.assertEqual(draw("--seed", "1"), first)
        self.assertEqual(draw("--seed", "1", ranks=1), first)
        self.assertEqual(draw("--seed", "1", ranks=2), first)
        self.assertNotEqual(draw("--seed", "2"), first)
        greedy = self.report(*ASK, "-n", "12", "--ignore-eos")["answers"][0]["ids"]
        self.assertEqual(draw("--top-k", "1"), greedy)
        self.assertEqual(draw("--top-p", "1e-6"), greedy)

    def test_generation_ends_where_the_context_is_full(self):
        report = self.report(*ASK, "-n", "100", "--ignore-eos", "-c", "310")
        self.assertEqual(report["answers"][0]["stop_reason"], "context_full")
        self.assertEqual(report["answers"][0]["cache"]["tokens"], 310)

    def test_no_limit_with_random_weights(self):
        ids = " ".join(["1"] * 300)
        model = self.copy(MODEL, "short", max_position_embeddings=100)
        report = self.report("-m", model, "--random-weights", "3", "--token-ids", "-p", ids, "-n", "2")
        self.assertEqual(report["context"]["tokens"], 300)
        self.assertEqual(report["model"]["random_weights"], 3)
        for file in model.iterdir():
            if file.name != "config.json":
                file.unlink()
        report = self.report("-m", model, "--random-weights", "3", "--token-ids", "-p", ids, "-n", "2",
                             ranks=2)
        self.assertEqual(report["context"]["tokens"], 300)


class RopeScaling(TestCase):
    # More than the copies' max_position_embeddings of 100.
    ids = " ".join(str(11 * i % 1000) for i in range(240))

    def parameters(self, kind, factor):
        own = json.loads((MODEL / "config.json").read_text())["rope_parameters"]
        return {**own, "rope_type": kind, "factor": factor}

    def answer(self, model, *flags, **options):
        report = self.report("-m", model, "--token-ids", "-p", self.ids, "-n", "6", "--ignore-eos",
                             "--dtype", "f32", *flags, **options)
        return report["answers"][0]["ids"], report["model"].get("rope_scaling")

    def test_by_the_model_and_by_flags(self):
        plain = self.copy(MODEL, "plain", max_position_embeddings=100)
        self.fail_with(kvzap("-m", plain, "--token-ids", "-p", self.ids), "240 tokens",
                       "max_position_embeddings = 100")
        answers = []
        for kind, attention in [("yarn", 1.1386), ("linear", 1), ("dynamic", 1)]:
            flags = ["--rope-scaling", kind, "--rope-scale", "4"]
            by_flags, described = self.answer(plain, *flags)
            self.assertEqual(described["type"], kind)
            self.assertEqual(described["original_max_position_embeddings"], 100)
            self.assertEqual(described["longest_context"], 400)
            self.assertAlmostEqual(described["attention_factor"], attention, places=4)
            scaled = self.copy(MODEL, kind, max_position_embeddings=100,
                               rope_parameters=self.parameters(kind, 4.0))
            self.assertEqual(self.answer(scaled, ranks=2), (by_flags, described))
            answers.append(by_flags)
        whole = self.copy(MODEL, "whole", rope_parameters=self.parameters("linear", 2.0))
        unscaled = self.answer(MODEL)
        self.assertEqual(unscaled[1], None)
        self.assertEqual(self.answer(whole, "--rope-scaling", "none"), unscaled)
        answers.append(unscaled[0])
        self.assertEqual(len({tuple(ids) for ids in answers}), 4)

    def test_policies_and_the_plan(self):
        # The keys of policies that turn them back: with an attention factor, which plain RoPE has not.
        flags = ["--rope-scaling", "yarn", "--rope-scale", "8", "--evict-ratio", "0.5"]
        for policy in ("expected-attention", "leverage", "streaming-llm+rerotate"):
            one = self.answer(MODEL, *flags, "--policy", policy)
            self.assertEqual(self.answer(MODEL, *flags, "--policy", policy, ranks=2), one)
        # Where frequencies depend on the length those are refused, on all ranks alike.
        dynamic = ["-m", MODEL, "--rope-scaling", "dynamic", "--rope-scale", "2"]
        texts = SOURCE / "tests/golden/policies/texts.jsonl"
        self.fail_with(kvzap(*dynamic, "-p", "one", "--policy", f"duo-attention:texts={texts}",
                             ranks=2), "duo-attention", "depend on the length", code=1)
        plan = self.succeed("-m", MODEL, "--dry-run", *flags).text
        self.assertIn(f"{8 * 4096} tokens", plan)


class Deck(TestCase):
    def deck(self, text):
        file = self.folder / "deck.toml"
        file.write_text(text)
        return file

    def test_demo(self):
        for ranks in (0, 2):
            result = self.succeed("--config", "inputs/demo.toml", cwd=SOURCE, ranks=ranks)
            self.assertEqual(result.text, "The special magic number for delta is 0507.\n")

    def test_flags_override(self):
        report = self.report("--config", "inputs/demo.toml", "--window", "77", "-n", "3",
                             "--threshold", "-inf", "--prune=always", cwd=SOURCE)
        self.assertEqual(report["options"]["window"], 77)
        self.assertEqual(report["options"]["prune"], "always")
        self.assertEqual(report["options"]["threshold"], "-inf")
        self.assertEqual(len(report["answers"][0]["ids"]), 3)
        # A prompt in either way replaces the deck's, a question its questions.
        report = self.report("--config", "inputs/demo.toml", "-p", "A b c.", "--question", "d?",
                             cwd=SOURCE)
        self.assertLess(report["context"]["tokens"], 50)
        self.assertEqual([a["question"] for a in report["answers"]], ["d?"])

    def test_every_kind_of_value(self):
        deck = self.deck(f"""
            model = "{MODEL}"
            dtype = "f32"
            prompt = "one two three"
            question = ["four", "five"]
            surrogate = "{MLP}"
            threshold = inf
            window = 2
            no-trim = true
            ignore-eos = true
            raw = false
            seed = 7
            temp = 0.5
            n-predict = 2
            """)
        report = self.report("--config", deck)
        options = report["options"]
        self.assertEqual([a["question"] for a in report["answers"]], ["four", "five"])
        self.assertEqual(options["threshold"], "inf")
        self.assertIs(options["trim"], False)
        self.assertEqual((options["seed"], options["temp"], options["window"]), (7, 0.5, 2))
        self.assertEqual([len(a["ids"]) for a in report["answers"]], [2, 2])

    def test_error_on_several_ranks(self):
        deck = self.deck("windw = 3")
        self.fail_with(kvzap("--config", deck, ranks=2), deck, ":1: windw: unknown key", "'window'", code=2)


class DryRun(TestCase):
    MODEL = SOURCE / "inputs/configs/Llama-65B"
    FLAGS = ["-m", MODEL, "--random-weights", "0", "-c", "128000", "--dry-run"]

    def test_llama_65b(self):
        for ranks in (1, 2):
            result = self.succeed(*self.FLAGS, "--evict-ratio", "0.75", ranks=ranks)
            lines = result.text.splitlines()
            table = lines[: 3 + ranks]
            self.assertLessEqual(max(map(len, lines)), 102)
            # The residual stream is whole on every rank.
            activations = {1: r"4\.3", 2: r"8\.5"}[ranks]
            self.assertRegex(
                table[-1],
                r"^ +all .* 335\.5 GB .* 83\.9 GB .* 4\.2 GB +" + activations + r" GB +[\d.]+ [kM]B +[\d.]+ GB$",
            )
            if ranks == 2:
                for rank in range(2):
                    self.assertRegex(lines[2 + rank], rf"^ +{rank} .* 167\.8 GB .* 41\.9 GB .* 2\.1 GB +4\.3 GB +[\d.]+ [kM]B +[\d.]+ GB$")

    def test_json(self):
        file = self.folder / "plan.json"
        printed = self.succeed(*self.FLAGS, "--json", file, ranks=2)
        self.assertIn("335.5 GB", printed.text)
        plan = json.loads(file.read_text())
        again = json.loads(self.succeed(*self.FLAGS, "--json", "-", ranks=2).out)
        for of_now in (plan, again):
            # Other programs take and free memory meanwhile.
            self.assertGreater(of_now["node"].pop("available_bytes"), 0)
            self.assertGreater(of_now["node"].pop("nodes_that_fit"), 0)
        self.assertEqual(plan, again)
        self.assertEqual(plan["total"]["kv_full_bytes"], 2 * 80 * 64 * 128 * 2 * 128000)
        self.assertEqual(plan["total"]["kv_kept_bytes"], plan["total"]["kv_full_bytes"])
        self.assertEqual(plan["total"]["dense_layer_bytes"], plan["total"]["kv_full_bytes"] // 80)
        self.assertEqual(len(plan["ranks"]), 2)
        for name, total in plan["total"].items():
            self.assertEqual(sum(rank[name] for rank in plan["ranks"]), total)
        self.assertEqual((plan["tokens"], plan["dtype"]), (128000, "bf16"))

    def test_whether_it_fits(self):
        for ranks in (0, 2):
            result = self.succeed("-m", MODEL, "-c", "4096", "--dry-run", "--evict-ratio", "0.5", ranks=ranks)
            self.assertRegex(result.text, rf"(?m)^this node: {max(1, ranks)} ranks? needs? [\d.]+ MB, [\d.]+ [GT]B are "
                                          "available: it fits$")
        flags = ["-m", self.folder, "--random-weights", "0", "--dry-run", "--json"]
        config = json.loads((self.MODEL / "config.json").read_text())
        config["num_hidden_layers"] = 4000  # more than any node that tests run on has room for, but not 64 of them
        (self.folder / "config.json").write_text(json.dumps(config))
        file = self.folder / "plan.json"
        for ranks in (1, 2):
            result = self.succeed(*flags, file, "-c", "2000", ranks=ranks)
            plan = json.loads(file.read_text())
            node = plan["node"]
            self.assertEqual((node["nodes"], node["ranks"], node["fits"]), (1, ranks, False))
            self.assertEqual(node["needed_bytes"], plan["total"]["needed_bytes"])
            self.assertGreater(node["needed_bytes"], node["available_bytes"])
            self.assertIn("it does not fit", result.text)
            many = node["nodes_that_fit"]
            if many is None:
                self.assertIn("no number of nodes like this one, with", result.text)
            else:
                self.assertGreaterEqual(many * node["available_bytes"], node["needed_bytes"])
                self.assertIn(f"{many} nodes like this one, with {ranks} rank", result.text)
        # The peak memory depends on the moment when rows are chosen.
        def total(*more):
            return json.loads(self.succeed("-m", MODEL, "-c", "4096", "--dry-run", "--json", "-", *more).out)

        fixed = ("weight_bytes", "activation_bytes", "attention_bytes")
        for more, is_full, parts in (
            ([], True, ["kv_full_bytes"]),
            (["--evict-ratio", "0.5"], False, ["kv_kept_bytes", "dense_layer_bytes"]),
            (["--policy", "knorm", "--evict-ratio", "0.5"], False, ["kv_kept_bytes", "dense_layer_bytes"]),
            (["--policy", "knorm+global", "--evict-ratio", "0.5"], True, ["kv_full_bytes"]),
        ):
            plan = total(*more)
            self.assertEqual(plan["full_at_first"], is_full, more)
            self.assertEqual(plan["total"]["needed_bytes"], sum(plan["total"][name] for name in [*fixed, *parts]))

    def test_of_a_prompt(self):
        plan = json.loads(self.succeed(*ASK, "-n", "10", "--dry-run", "--json", "-").out)
        question = self.report(*ASK, "-n", "0")["answers"][0]["question_tokens"]
        self.assertEqual(plan["tokens"], CASE["n_context"] + question + 10)
        plan = json.loads(self.succeed("-m", MODEL, "--dry-run", "--json", "-").out)
        self.assertEqual(plan["tokens"], 4096)

    def test_real_run_takes_what_was_planned(self):
        plan = json.loads(self.succeed(*ASK, "-c", "289", "--dry-run", "--json", "-", ranks=2).out)
        report = self.report(*ASK, ranks=2)
        self.assertEqual(plan["total"]["kv_full_bytes"], report["context"]["kv"]["full_bytes"])
        self.assertEqual(
            [rank["weight_bytes"] for rank in plan["ranks"]], report["memory"]["weight_bytes_per_rank"]
        )


class Output(TestCase):
    def test_json_file(self):
        file = self.folder / "report.json"
        file.write_text("old")
        result = self.succeed(*ASK, "--json", file, ranks=2)
        self.assertEqual(result.text, GOLDEN + "\n")
        report = json.loads(file.read_text())
        self.assertEqual((report["format"], report["format_version"]), ("kvzap.run", 1))
        self.assertEqual(report["answers"][0]["text"], GOLDEN)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["report.json"])

    def test_devices_and_pipes_are_written_in_place(self):
        # Through a link, so that a program that gets this wrong replaces the link and not the device.
        link = self.folder / "link"
        link.symlink_to("/dev/null")
        self.succeed(*ASK, "--json", link)
        self.assertTrue(link.is_symlink())
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
            self.succeed(*ASK, "--json", pipe)
            self.assertEqual(json.loads(reader.stdout.read())["format"], "kvzap.run")
        self.assertTrue(pipe.is_fifo())

    def test_standard_output_by_name(self):
        # A pipe has no name of its own, and a file has the answer already.
        result = run_command([KVZAP, "run", *ASK, "-q", "--json", "/dev/stdout"], stdout=subprocess.PIPE)
        file = self.folder / "out"
        with open(file, "wb") as stream:
            self.assertEqual(run_command([KVZAP, "run", *ASK, "-q", "--json", "/dev/stdout"], stdout=stream).code, 0)
        for text in (result.out.decode(), file.read_text(encoding="utf-8")):
            self.assertTrue(text.startswith(GOLDEN + "\n"), text[:200])
            self.assertEqual(json.loads(text[len(GOLDEN) :])["format"], "kvzap.run")

    def test_full_standard_output(self):
        if not pathlib.Path("/dev/full").exists():
            self.skipTest("no /dev/full")
        for arguments in (
            ["run", *ASK],
            ["run", *ASK, "--json", "-"],
            ["run", *DryRun.FLAGS],
            ["--help"],
            ["--version"],
        ):
            with open("/dev/full", "wb") as full, self.subTest(arguments=arguments[-1]):
                result = run_command([KVZAP, *arguments], stdout=full)
                self.fail_with(result, "standard output: writing failed", code=1)

    def test_full_report(self):
        if not pathlib.Path("/dev/full").exists():
            self.skipTest("no /dev/full")
        link = self.folder / "link"
        link.symlink_to("/dev/full")
        result = kvzap(*ASK, "--json", link, "-q")
        self.assertEqual(result.code, 1)
        self.assertIn(f"--json {link}: writing failed", result.errors[0])
        self.assertEqual(result.text, GOLDEN + "\n")


class Help(TestCase):
    def test_version(self):
        declared = re.search(r"project\([^)]*VERSION\s+([\d.]+)", (SOURCE / "CMakeLists.txt").read_text())
        result = run_command([KVZAP, "--version"])
        self.assertEqual((result.code, result.err), (0, b""), result)
        lines = result.text.splitlines()
        self.assertEqual(lines[0], f"kvzap {declared.group(1)}")
        parts = {line[:16].strip(): line[17:] for line in lines[1:]}
        self.assertEqual(list(parts), ["revision", "Kokkos", "Kokkos Kernels", "MPI", "NCCL", "HDF5", "BLAS",
                                       "oneDNN", "instruction set", "byte products", "compiler"])
        for name, what in parts.items():
            self.assertTrue(what.strip(), name)
        self.assertRegex(parts["Kokkos"], r"^\d+\.\d+\.\d+, (\w+, )*\w+ \(default (\w+)\)$")
        if MPIEXEC:
            self.assertRegex(parts["MPI"], r"\d, (not )?GPU-aware$")
        else:
            self.assertEqual(parts["MPI"], "none, one rank")
        hdf5 = (r"^\d+\.\d+\.\d+, " + ("parallel$" if MPIEXEC else "serial$")) if HAVE_HDF5 else "^none"
        self.assertRegex(parts["HDF5"], hdf5)

    def test_version_is_printed_once(self):
        result = run_command(on_ranks(2, [KVZAP, "--version"]))
        self.assertEqual((result.code, result.text.count("kvzap ")), (0, 1), result)


if __name__ == "__main__":
    unittest.main()
