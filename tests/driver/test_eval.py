"""kvzap eval: the same as kvzap run of each setting, on any ranks, ended at any time, and what it refuses."""
import csv
import json
import resource
import signal
import subprocess
import time
import unittest

from harness import KVZAP, LINEAR, MODEL, SOURCE, Result, TestCase, on_ranks, run_command

TASKS = SOURCE / "inputs/eval/recall-256.jsonl"
SECONDS = ("prefill_seconds", "decode_seconds")
POLICIES = "none;kvzap@thresholds=-5,-3;snapkv:window=16;knorm+ada@evict-ratios=0.5;streaming-llm;kvzip@evict-ratios=0.75"


def evaluate(*arguments, ranks=0, **options):
    for flag, value in (("-m", MODEL), ("--dtype", "f32")):
        if flag not in arguments:
            arguments = (flag, value, *arguments)
    return run_command(on_ranks(ranks, [KVZAP, "eval", *arguments]), **options)


def flags_of(setting, surrogate=None):
    """What kvzap run is told for a setting of evaluation.json."""
    if setting["policy"] == "none":
        return []
    name = setting["policy"].replace("kvzap", "kvzap:surrogate=" + str(surrogate))
    flags = ["--policy", name, "--prune", setting["prune"], "--prefill", setting["prefill"],
             "--prune-after", setting["prune_after"]]
    for key in ("evict_ratio", "threshold", "keep_tokens"):
        if key in setting:
            flags += ["--" + key.replace("_", "-"), str(setting[key])]
    return flags


class EvalTestCase(TestCase):
    def tasks(self, count):
        """Rows from all over the file, so that there are several tasks."""
        lines = TASKS.read_text().splitlines()
        file = self.folder / "tasks.jsonl"
        file.write_text("".join(lines[37 * i % len(lines)] + "\n" for i in range(count)))
        return file

    def done(self, result):
        self.assertEqual(result.code, 0, result)
        self.assertEqual(result.errors, [], result)
        return result

    def records(self, folder):
        """By prompt and setting, without what time they took."""
        found = {}
        for line in (folder / "records.jsonl").read_text().splitlines():
            record = json.loads(line)
            for key in SECONDS:
                self.assertGreaterEqual(record.pop(key), 0)
            key = (record["task_file"], record["line"], record["setting"])
            self.assertNotIn(key, found)
            found[key] = record
        return found

    def summary(self, folder):
        summary = json.loads((folder / "summary.json").read_text())
        for row in summary["rows"]:
            for key in SECONDS:
                row.pop(key)
        return summary

    def assert_same(self, a, b):
        self.assertEqual(self.records(a), self.records(b))
        self.assertEqual(self.summary(a), self.summary(b))


class Agreement(EvalTestCase):
    def test_the_same_as_run_of_each_setting(self):
        tasks, out = self.tasks(2), self.folder / "out"
        moments = ("snapkv@evict-ratios=0.5@prune-after=question;kvzap@threshold=-4@prune=always;"
                   "tova@evict-ratio=0.5@prefill=sparse;knorm@keep-tokens=40")
        result = self.done(evaluate("--tasks", tasks, "--surrogate", LINEAR, "--policies", POLICIES + ";" + moments,
                                    "--evict-ratios", "0,0.5,0.75", "-o", out, "--chunk", "64"))
        plan = result.err.decode()
        self.assertIn("2 prompts, 13 settings", plan)
        self.assertIn("1 of context and question is shared by: snapkv@evict-ratio=0.5@prune-after=question", plan)
        self.assertIn("each needs its own: tova@evict-ratio=0.5@prefill=sparse", plan)
        evaluation = json.loads((out / "evaluation.json").read_text())
        settings = evaluation["settings"]
        self.assertEqual(evaluation["tasks"][0]["rows"], 2)
        self.assertEqual([s["shares"] for s in settings].count("context"), 11)
        records = self.records(out)
        self.assertEqual(len(records), 2 * len(settings))
        context = self.folder / "context.txt"
        for number, line in enumerate(tasks.read_text().splitlines(), 1):
            task = json.loads(line)
            context.write_text(task["context"])
            for setting in settings:
                report = self.report("-m", MODEL, "--dtype", "f32", "-f", context, "--question", task["question"],
                                     "-n", task["max_new_tokens"], "--chunk", "64", *flags_of(setting, LINEAR))
                record = records[str(tasks), number, setting["label"]]
                with self.subTest(line=number, setting=setting["label"]):
                    self.assertEqual(record["answers"], [report["answers"][0]["text"]])
                    expected = task["answer"] if isinstance(task["answer"], list) else [task["answer"]]
                    self.assertEqual(record["expected"], expected)
                    # Pairs that are evicted during generation are known only at the end.
                    always = setting["prune"] == "always"
                    state = report["answers"][0]["cache"] if always else report["context"]
                    self.assertAlmostEqual(record["evict_ratio"], state["evict_ratio"], places=12)
                    self.assertEqual(record["kept_rows"], state["kept_rows"])
                    self.assertEqual(record["cache_tokens"], state["tokens"])
                    rows = sum(map(sum, report["answers"][0]["cache"]["kept_rows"]))
                    self.assertEqual(record["kv_bytes_at_end"], rows * 2 * 32 * 4)
                    if always:
                        self.assertEqual(record["kv_bytes"], record["kv_bytes_at_end"])
                        continue
                    self.assertEqual(record["kv_bytes"], report["context"]["kv"]["live_bytes"])
                    self.assertEqual(record["full_kv_bytes"], report["context"]["kv"]["full_bytes"])

        # The table, the CSV and the summary say what the records do.
        rows = self.summary(out)["rows"]
        table = list(csv.DictReader((out / "summary.csv").read_text().splitlines()))
        self.assertEqual([(r["task"], r["setting"]) for r in rows], [(r["task"], r["setting"]) for r in table])
        self.assertLessEqual(max(map(len, result.text.splitlines())), 120)
        for row, line in zip(rows, table):
            mine = [r for r in records.values() if r["setting"] == row["setting"] and row["task"] in (r["task"], "all")]
            self.assertEqual(row["prompts"], len(mine))
            self.assertAlmostEqual(row["accuracy"], sum(r["score"] for r in mine) / len(mine))
            self.assertAlmostEqual(float(line["accuracy"]), row["accuracy"])
            self.assertAlmostEqual(row["evict_ratio_max"], max(r["evict_ratio"] for r in mine))
            self.assertIn(row["setting"].split("@")[0], result.text)
        self.assertRegex(result.text, r"\nkvzap, threshold -5.000 \([0-9]+ % evicted\) ")

    def test_ranks_batches_and_ways_to_share_give_the_same_records(self):
        tasks = self.tasks(5)
        rows = [json.loads(line) for line in tasks.read_text().splitlines()]
        rows[3]["context"] = rows[2]["context"]  # two questions about one context
        tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
        common = ("--tasks", tasks, "--surrogate", LINEAR, "--policies", POLICIES, "--evict-ratios", "0.5,0.75")
        self.done(evaluate(*common, "-o", self.folder / "one"))
        for name, ranks, extra in (("batch", 0, ("--batch", "1")), ("heads", 2, ("--parallel", "heads")),
                                   ("prompts", 2, ("--parallel", "prompts"))):
            with self.subTest(name):
                result = self.done(evaluate(*common, *extra, "-o", self.folder / name, ranks=ranks))
                self.assert_same(self.folder / name, self.folder / "one")
                self.assertIn("all: 5 prompts", result.text)

    def test_tries_draw_answers_of_their_own(self):
        common = ("--tasks", self.tasks(2), "--policies", "none;tova", "--evict-ratios", "0.75", "--tries", "3",
                  "--temp", "1.5", "--seed", "7", "--pass-k", "2", "-n", "6")
        self.done(evaluate(*common, "-o", self.folder / "a"))
        self.done(evaluate(*common, "-o", self.folder / "b", "--parallel", "prompts", ranks=2))
        self.assert_same(self.folder / "a", self.folder / "b")
        for record in self.records(self.folder / "a").values():
            self.assertEqual((len(record["answers"]), len(record["scores"])), (3, 3))
            self.assertAlmostEqual(record["score"], sum(record["scores"]) / 3)
        self.assertGreater(len({tuple(r["answers"]) for r in self.records(self.folder / "a").values()}), 1)
        self.assertTrue(all("pass_at_k" in row for row in self.summary(self.folder / "a")["rows"]))

    def test_a_question_without_context(self):
        (self.folder / "tasks.jsonl").write_text(json.dumps({"question": "The calm barrel waits", "answer": "x"}))
        self.done(evaluate("--tasks", self.folder / "tasks.jsonl", "--policies", "none", "--raw", "-n", "3", "-o",
                           self.folder / "out"))
        record, = self.records(self.folder / "out").values()
        report = self.report("-m", MODEL, "--dtype", "f32", "-p", "The calm barrel waits", "--raw", "-n", "3")
        self.assertEqual(record["answers"], [report["answers"][0]["text"]])
        self.assertEqual(record["context_tokens"] + record["question_tokens"], report["context"]["tokens"])

    def test_a_task_of_the_name_of_all_prompts(self):
        rows = [json.loads(line) for line in self.tasks(2).read_text().splitlines()]
        rows[0]["task"] = "all"
        tasks = self.folder / "own.jsonl"
        tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.done(evaluate("--tasks", tasks, "--policies", "none", "-o", self.folder / "out"))
        self.assertEqual([(row["task"], row["prompts"]) for row in self.summary(self.folder / "out")["rows"]],
                         [("own/all", 1), (rows[1]["task"], 1), ("all", 2)])

    def test_files_with_the_same_tasks_are_told_apart(self):
        for name in ("short", "long"):
            (self.folder / f"{name}.jsonl").write_text(TASKS.read_text().splitlines()[0] + "\n")
        files = f"{self.folder}/short.jsonl,{self.folder}/long.jsonl"
        self.done(evaluate("--tasks", files, "--policies", "none", "-o", self.folder / "out"))
        self.assertEqual([row["task"] for row in self.summary(self.folder / "out")["rows"]],
                         ["short/niah_single_noise", "long/niah_single_noise", "all"])


class GoingOn(EvalTestCase):
    COMMON = ("--policies", "none;snapkv;knorm", "--evict-ratios", "0.5,0.75")

    def whole(self, tasks):
        self.done(evaluate("--tasks", tasks, *self.COMMON, "-o", self.folder / "whole"))
        return self.folder / "whole"

    def end_early(self, tasks, out, number, ranks=0, extra=()):
        """Sends a signal as soon as there are records; returns the exit status."""
        command = on_ranks(ranks, [KVZAP, "eval", "-m", MODEL, "--dtype", "f32", "--tasks", tasks, *self.COMMON, "-o",
                                   out, *extra])
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            records = out / "records.jsonl"
            while process.poll() is None and not (records.exists() and records.stat().st_size):
                time.sleep(0.005)
            process.send_signal(number)
            process.communicate()
        return process.returncode

    def test_the_same_command_goes_on(self):
        tasks = self.tasks(20)
        whole = self.whole(tasks)
        count = len(self.records(whole))
        for name, number in (("killed", signal.SIGKILL), ("terminated", signal.SIGTERM)):
            out = self.folder / name
            status = self.end_early(tasks, out, number)
            self.assertEqual(status, -number if number == signal.SIGKILL else 128 + number)
            if number == signal.SIGTERM:  # what is there has been summed up
                self.assertFalse(self.summary(out)["complete"])
            before = (out / "records.jsonl").read_bytes()
            self.assertLess(before.count(b"\n"), count)
            with open(out / "records.jsonl", "ab") as file:
                file.write(before[: before.index(b"\n") - 10])  # as if a prompt had been torn
            result = self.done(evaluate("--tasks", tasks, *self.COMMON, "-o", out))
            self.assertIn("has been cut off", result.err.decode())
            self.assertTrue((out / "records.jsonl").read_bytes().startswith(before))
            self.assert_same(out, whole)
            again = self.done(evaluate("--tasks", tasks, *self.COMMON, "-o", out, "--json", "-", "-q"))
            self.assertEqual(again.err, b"")
            self.assertTrue(json.loads(again.out)["complete"])

    def test_on_ranks_that_take_prompts_in_turns(self):
        tasks = self.tasks(20)
        out = self.folder / "out"
        status = self.end_early(tasks, out, signal.SIGUSR1, ranks=2, extra=("--parallel", "prompts"))
        self.assertNotEqual(status, 0)
        self.done(evaluate("--tasks", tasks, *self.COMMON, "-o", out))  # on one rank
        self.assert_same(out, self.whole(tasks))

    def test_a_full_disk_leaves_what_was_there(self):
        tasks, out = self.tasks(20), self.folder / "out"
        command = [KVZAP, "eval", "-m", MODEL, "--dtype", "f32", "--tasks", tasks, *self.COMMON, "-o", out]
        # (Python ignores SIGXFSZ, and so does what it starts thus.)
        with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              restore_signals=False) as process:
            records = out / "records.jsonl"
            while process.poll() is None and not (records.exists() and records.stat().st_size):
                time.sleep(0.005)
            size = records.stat().st_size + 4000
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))
            output, errors = process.communicate()
        self.fail_with(Result(process.returncode, output, errors), "records.jsonl: cannot be written",
                       "the same command continues", "File too large")
        text = (out / "records.jsonl").read_text()
        self.assertTrue(text.endswith("\n"))
        self.assertEqual(text.count("\n") % 5, 0)  # whole prompts
        self.done(evaluate("--tasks", tasks, *self.COMMON, "-o", out))
        self.assert_same(out, self.whole(tasks))


class BadInput(EvalTestCase):
    def refuse(self, *arguments, parts, ranks=0, tasks=None, policies="none;knorm", output=None):
        tasks = tasks or self.tasks(2)
        result = evaluate("--tasks", tasks, "--policies", policies, "-o", output or self.folder / "out", *arguments,
                          ranks=ranks)
        return self.fail_with(result, *parts)

    def test_rows(self):
        row = json.loads(self.tasks(1).read_text())
        broken = self.folder / "broken.jsonl"
        good = json.dumps(row)
        classes = json.dumps({**row, "metric": "classification"})
        longer = json.dumps({**row, "context": 40 * row["context"]})
        for bad, parts in ((good[:50], ["broken.jsonl", "2"]),
                           (json.dumps({**row, "metric": "string_match_al"}), ["2", "string_match_al", "string_match_all"]),
                           (classes, ["2", "classification"]),
                           (longer, ["line 2", "the longest accepted", "--keep-going"])):
            broken.write_text(f"{good}\n{bad}\n{good}\n")
            self.refuse(tasks=broken, parts=parts)
            self.assertFalse((self.folder / "out").exists())
            kept = self.done(evaluate("--tasks", broken, "--policies", "none", "-o", self.folder / "kept", "--keep-going"))
            self.assertIn("1 prompt left out", kept.err.decode())
            summary = json.loads((self.folder / "kept/summary.json").read_text())
            self.assertEqual((summary["left_out"], summary["prompts"]), (1, 2))
            for file in (self.folder / "kept").iterdir():
                file.unlink()
        broken.write_text(longer + "\n")
        self.refuse("--keep-going", tasks=broken, parts=["no prompts are left", "line 1"])
        self.refuse("-c", "100", parts=["line 1", "the longest accepted is 100"], ranks=2)

    def test_options(self):
        for arguments, parts in (
            (["--tries", "2"], ["--tries 2 needs --temp"]),
            (["--pass-k", "2"], ["--pass-k is 2"]),
            (["--evict-ratios", "0.5,1"], ["--evict-ratios has the entry '1'"]),
            (["--batch", "-1"], ["--batch"]),
            (["--placement", "x", "--parallel", "prompts"], ["--placement"]),
            (["--policy", "x"], ["did you mean --polic"]),
            (["-n", str(2**63 - 1)], ["-n is 9223372036854775807"]),
            (["--surrogate", self.folder / "nowhere"], ["--surrogate", "nowhere: there is no such folder"]),
            (["--tasks", b"\xff.jsonl"], ["--tasks", "is not UTF-8"]),
        ):
            self.refuse(*arguments, parts=parts)
        self.refuse(policies="none;snapkw", parts=["did you mean snapkv"])
        self.refuse(policies="kvzap", parts=["--policies: kvzap: ", "--surrogate"])
        self.refuse(policies="snapkv@prune=always@evict-ratio=0.5", parts=["--policies: snapkv@", "--prune always"])
        self.refuse(policies="h2o@evict-ratio=0.5@prune-after=question@decode-every=8@decode-keep=64",
                    parts=["--policies: h2o@evict-ratio", "cuts while the answer is generated"])
        self.refuse(policies="snapkv@evict-ratoi=0.5", parts=["--policies: snapkv@", "did you mean evict-ratio"])
        deck = self.folder / "deck.toml"
        deck.write_text("polices = \"none\"\n")
        self.refuse("--config", deck, parts=["deck.toml:1: polices: unknown key; did you mean 'policies'"])

    def test_files_of_policies_and_prompts_that_have_changed(self):
        ratios, templates, out = self.folder / "ratios.txt", self.folder / "templates.json", self.folder / "out"
        ratios.write_text("0.5\n" * 6)
        templates.write_text('{"a": "{context} {input}"}')
        command = ("--tasks", self.tasks(1), "--policies", f"knorm+per-layer:ratios={ratios};kvzap@threshold=-4",
                   "--prompt-templates", templates, "--surrogate", self.copy(LINEAR, "surrogate"), "-o", out)
        self.done(evaluate(*command))
        self.done(evaluate(*command))
        for file, name, (old, new) in (
                (ratios, f"options.policy_files.{ratios}", ("0.5", "0.4")),
                (templates, "options.prompt_templates_hash", ("{input}", "{input}?")),
                (self.folder / "surrogate/config.json", "options.surrogate_hash", ("}", "}\n"))):
            before = file.read_text()
            file.write_text(before.replace(old, new))
            self.fail_with(evaluate(*command), "has another evaluation", name + ": recorded ")
            file.write_text(before)
        self.done(evaluate(*command))

    def test_weights_that_one_of_the_ranks_cannot_read(self):
        tasks, commands = self.tasks(2), []
        for name in ("whole", "broken"):
            self.copy(MODEL, name + "/model")
            commands.append(["-wdir", self.folder / name, KVZAP, "eval", "-m", "model", "--tasks", tasks, "--policies",
                             "none", "-o", self.folder / "out", "--parallel", "prompts"])
        (self.folder / "broken/model/model.safetensors").write_bytes(b"broken")
        *launcher, ranks, _ = on_ranks(2, [])
        result = run_command([*launcher, ranks, 1, *commands[0], ":", ranks, 1, *commands[1]], timeout=60)
        self.fail_with(result, "model.safetensors", "on rank 1 of 2")

    def test_another_evaluation_in_the_folder(self):
        tasks, out = self.tasks(2), self.folder / "out"
        deck = self.folder / "deck.toml"
        deck.write_text(f'tasks = ["{tasks}"]\npolicies = ["none", "knorm"]\nevict-ratios = "0.5"\nwindow = 64\n')
        self.done(evaluate("--config", deck, "-o", out))
        before = (out / "records.jsonl").read_bytes()
        for arguments, part in ((["--window", "65"], "options.window: recorded 64, given 65"),
                                (["--policies", "none;knorm;tova"], "tova@evict-ratio=0.5 is only in the given evaluation"),
                                (["--per-task", "1"], "options.per_task: recorded absent, given 1"),
                                (["--dtype", "bf16"], "options.dtype")):
            self.fail_with(evaluate("--config", deck, "-o", out, *arguments, ranks=2 if "bf16" in arguments else 0),
                           "has another evaluation", part)
        model = self.copy(MODEL, "other", transformers_version="0")
        self.fail_with(evaluate("-m", model, "--config", deck, "-o", out), "model.config_hash")
        tasks.write_text(tasks.read_text().replace("the", "The"))
        self.fail_with(evaluate("--config", deck, "-o", out), "hash: recorded")
        self.assertEqual((out / "records.jsonl").read_bytes(), before)
        # What is asked of the model may change with all the rows as they were.
        prompts, asked = self.folder / "prompts.json", self.folder / "asked"
        for text, result in (("{context} {input}", None), ("{context}. {input}", "options.prompt_templates_hash: recorded")):
            prompts.write_text(json.dumps(dict.fromkeys(("hotpotqa", "trec", "passage_count"), text)))
            run = evaluate("--tasks", SOURCE / "tests/eval/longbench.jsonl", "--prompt-templates", prompts,
                           "--policies", "none", "-n", 1, "-o", asked)
            self.fail_with(run, result) if result else self.done(run)
        self.fail_with(evaluate("--config", deck, "-o", deck), "both name the file", code=2)
        (self.folder / "file").write_text("")
        self.fail_with(evaluate("--config", deck, "-o", self.folder / "file"), "is a file; expected a folder")
        self.fail_with(evaluate("--config", deck, "-o", deck / "out"), "cannot be created")


if __name__ == "__main__":
    unittest.main()
