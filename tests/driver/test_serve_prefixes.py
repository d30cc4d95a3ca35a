"""Stored states of documents: kvzap serve --prefix-store after a restart, and kvzap prefix."""
import json
import os
import pathlib
import shutil
import tempfile
import time
import unittest

import harness
import test_serve as serve
from harness import KVZAP, MODEL, on_ranks, run_command
from test_serve import CASE, CHAT, PLAIN, PRUNED, asking, cached_tokens_of, text_of

DOCUMENT = CASE["n_context"] - 8  # tokens, but for what the template adds
QUESTIONS = [CASE["question"], *serve.Answers.QUESTIONS[1:]]


class StoreTest(serve.ServerTest):
    def setUp(self):
        super().setUp()
        if not harness.HAVE_HDF5:
            raise unittest.SkipTest("needs HDF5")
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="kvzap-store-"))
        self.addCleanup(shutil.rmtree, self.folder, True)
        self.store = self.folder / "states"

    def start_with_store(self, *flags, **options):
        return self.start(*PRUNED, "--prefix-store", self.store, *flags, **options)

    def ask(self, server, question, context=CASE["context"], **fields):
        reply = server.post(CHAT, asking(context, question, max_tokens=24, ignore_eos=True, **fields))
        return (text_of(reply), reply["kvzap"]["evict_ratio"]), cached_tokens_of(reply)

    def alone(self, question, *flags, **fields):
        server = self.start(*PRUNED, *flags)
        answer, cached = self.ask(server, question, **fields)
        self.assertEqual(cached, 0)
        self.stop(server)
        return answer

    def files(self):
        return sorted(self.store.glob("kvzap-prefix-*.h5"))

    def prefix(self, action, *flags, code=0, ranks=0):
        result = run_command(on_ranks(ranks, [KVZAP, "prefix", action, "--prefix-store", self.store, *flags]))
        self.assertEqual(result.code, code, result)
        return result

    def listed(self, *flags):
        return json.loads(self.prefix("list", "--json", *flags).text)["prefixes"]

    def warnings(self, server):
        return [line for line in server.lines if "prefix store: " in line]


class Restart(StoreTest):
    def test_second_question(self):
        """On other ranks, too. The answers are those of servers without a store."""
        alone = [self.alone(question) for question in QUESTIONS[:3]]
        for question, expected, ranks in zip(QUESTIONS, alone, (0, 0, 2)):
            server = self.start_with_store(ranks=ranks)
            answer, cached = self.ask(server, question)
            self.assertEqual(answer[0], expected[0])
            self.assertAlmostEqual(answer[1], expected[1], places=9)
            if question is QUESTIONS[0]:
                self.assertEqual(cached, 0)
            else:
                self.assertGreaterEqual(cached, DOCUMENT)
                self.assertEqual(server.metrics()["kvzap_prefixes_restored_total"], 1)
            self.assertEqual(self.ask(server, QUESTIONS[0], kvzap={"threshold": -4})[1] >= DOCUMENT,
                             question is not QUESTIONS[0])
            self.stop(server)
            self.assertEqual(self.warnings(server), [])
            self.assertEqual(len(self.files()), 2)
            self.assertEqual(self.store.stat().st_mode & 0o777, 0o700)

    def test_full_cache_and_types(self):
        """Without pruning any beginning is found, also of documents with their question in one text."""
        for fields in ({"prune": "none"}, {"prune": "none", "kv_type": "q8"}, {"kv_type": "q8"}):
            with self.subTest(**fields):
                server = self.start_with_store()
                first, cached = self.ask(server, QUESTIONS[0], kvzap=fields)
                self.assertEqual(cached, 0)
                self.stop(server)
                server = self.start_with_store()
                again, cached = self.ask(server, QUESTIONS[0], kvzap=fields)
                self.assertGreaterEqual(cached, DOCUMENT)
                self.assertEqual(again, first)
                self.stop(server)
        server = self.start_with_store()
        text = CASE["context"] + " " + QUESTIONS[1]
        reply = server.post(CHAT, asking(text, max_tokens=24, ignore_eos=True, kvzap={"prune": "none"}))
        self.assertGreaterEqual(cached_tokens_of(reply), DOCUMENT)
        self.stop(server)
        fresh = self.start(*PRUNED)
        expected = fresh.post(CHAT, asking(text, max_tokens=24, ignore_eos=True, kvzap={"prune": "none"}))
        self.assertEqual(text_of(reply), text_of(expected))
        self.stop(fresh)

    def test_policies(self):
        """Policies that requests name, whose budgets choose after the document. The oracle is not repeated."""
        for wish in ({"policy": "snapkv:window=16", "evict_ratio": 0.5}, {"policy": "kvzip", "evict_ratio": 0.6},
                     {"policy": "knorm+ada", "keep_tokens": 200}):
            with self.subTest(wish["policy"]):
                answers = [self.alone(question, kvzap=wish) for question in QUESTIONS[:2]]
                for question, expected, ranks in zip(QUESTIONS, answers, (2, 0)):
                    server = self.start_with_store(ranks=ranks)
                    answer, cached = self.ask(server, question, kvzap=wish)
                    self.assertEqual(answer[0], expected[0])
                    self.assertAlmostEqual(answer[1], expected[1], places=9)
                    self.assertEqual(cached >= DOCUMENT, question is not QUESTIONS[0])
                    self.stop(server)
                    self.assertEqual(self.warnings(server), [])

    def test_while_it_runs(self):
        """States are written before the end: a server that is killed has left them."""
        server = self.start_with_store()
        self.ask(server, QUESTIONS[0])
        end = time.monotonic() + harness.PATIENCE
        while server.metrics()["kvzap_prefixes_stored_total"] < 1 and time.monotonic() < end:
            time.sleep(0.01)
        server.kill()
        (file,) = self.files()
        # What it has left unfinished, a later one removes; other files stay.
        unfinished = file.with_name(f"{file.name}.tmp-{self.node()}-{server.process.pid}-0")
        unfinished.write_bytes(b"half")
        other = self.store / "notes.txt"
        other.write_text("of somebody else")
        server = self.start_with_store()
        self.assertGreaterEqual(self.ask(server, QUESTIONS[1])[1], DOCUMENT)
        self.stop(server)
        self.assertFalse(unfinished.exists())
        self.assertTrue(other.exists())
        self.assertEqual(len(self.warnings(server)), 1, server.log())

    def node(self):
        """As files::node_name."""
        number = os.readlink("/proc/self/ns/pid")[5:-1]
        host = os.uname().nodename.replace("/", "_")
        return host if number == "4026531836" else f"{host}-{number}"

    def test_damaged_files(self):
        expected = self.alone(QUESTIONS[1])
        server = self.start_with_store()
        self.ask(server, QUESTIONS[0])
        self.stop(server)
        (file,) = self.files()
        whole = file.read_bytes()
        middle = len(whole) // 2
        damages = {"rows": whole[:middle] + bytes(255 - b for b in whole[middle:middle + 4096]) + whole[middle + 4096:],
                   "truncated": whole[:-5000], "empty": b"", "foreign": b"x" * 10000,
                   "structure": whole[:64] + bytes(255 - b for b in whole[64:128]) + whole[128:]}
        for ranks, names in ((0, damages), (2, ("rows", "truncated"))):
            for name in names:
                with self.subTest(name, ranks=ranks):
                    file.write_bytes(damages[name])
                    server = self.start_with_store(ranks=ranks)
                    answer, cached = self.ask(server, QUESTIONS[1])
                    self.assertEqual((answer[0], cached), (expected[0], 0))
                    self.stop(server)
                    (warning,) = self.warnings(server)
                    self.assertRegex(warning, r"kvzap: warning: prefix store: removed: snapshot .*kvzap-prefix-")
                    self.assertEqual(self.files(), [file])  # written anew

    def test_bound(self):
        texts = [f"Note {i}. {CASE['context']}" for i in range(3)]
        server = self.start_with_store()
        self.ask(server, QUESTIONS[0], texts[0])
        server.wait_until_idle()
        self.stop(server)
        size = self.files()[0].stat().st_size
        server = self.start_with_store("--prefix-store-size", str(2 * size + size // 2))
        for text in texts[1:]:
            self.ask(server, QUESTIONS[0], text)
        self.stop(server)
        self.assertEqual(len(self.files()), 2)
        server = self.start_with_store("--prefix-store-size", "1k")
        self.assertEqual(self.files(), [])
        self.ask(server, QUESTIONS[0])
        self.stop(server)
        self.assertEqual(self.files(), [])

    def test_full_disk(self):
        """A limit on files stands for it. Requests are answered, and the log says why nothing is stored."""
        expected = self.alone(QUESTIONS[0])
        server = self.start_with_store(wrapper=["bash", "-c", "ulimit -f 50; exec \"$@\"", "bash"])
        self.assertEqual(self.ask(server, QUESTIONS[0])[0][0], expected[0])
        self.assertGreaterEqual(self.ask(server, QUESTIONS[1])[1], DOCUMENT)
        self.stop(server)
        (warning,) = self.warnings(server)
        self.assertRegex(warning, "prefix store: snapshot .*")
        self.assertEqual(list(self.store.iterdir()), [])

    def test_two_servers(self):
        one, two = self.start_with_store(), self.start_with_store()
        self.ask(one, QUESTIONS[0])
        one.wait_until_idle()
        end = time.monotonic() + harness.PATIENCE
        while one.metrics()["kvzap_prefixes_stored_total"] < 1 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(1.1)  # the other one looks once a second
        self.assertGreaterEqual(self.ask(two, QUESTIONS[1])[1], DOCUMENT)
        # Both write the same state at the same time.
        for server in (one, two):
            self.ask(server, QUESTIONS[0], kvzap={"threshold": -4})
        # One loses a file that the other has in its list.
        for file in self.files():
            file.unlink()
        self.assertGreaterEqual(self.ask(two, QUESTIONS[2])[1], DOCUMENT)
        for server in (one, two):
            self.stop(server)
            self.assertEqual(self.warnings(server), [])

    def test_wrong_options(self):
        file = self.folder / "file"
        file.write_text("")
        for flags, words in ((["--prefix-store", file], "--prefix-store: "),
                             (["--prefix-store", self.store, "--prefix-store-size", "much"], "--prefix-store-size")):
            result = run_command([KVZAP, "serve", "-m", MODEL, *PRUNED, *flags])
            self.assertIn(result.code, (1, 2))
            self.assertIn(words, result.errors[0])


class Command(StoreTest):
    def add(self, *flags, **options):
        document = self.folder / "document.txt"
        document.write_text(CASE["context"])
        return self.prefix("add", "-m", MODEL, *PRUNED, "-f", document, *flags, **options)

    def test_round_trip(self):
        for ranks in (0, 2):
            shutil.rmtree(self.store, True)
            added = json.loads(self.add("--json", ranks=ranks).text)["prefixes"]
            (one,) = self.listed()
            self.assertEqual(added, [one])
            self.assertEqual(one["model"], MODEL.name)
            self.assertGreaterEqual(one["tokens"], DOCUMENT)
            self.assertGreater(one["rows"], 0)
            self.assertLess(one["rows"], 24 * one["tokens"])
            self.assertEqual(one["bytes"], self.files()[0].stat().st_size)
            self.assertRegex(one["last_use"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")
            self.assertIn(" ".join(CASE["context"].split()[:3]), one["text"])
            table = self.prefix("list").text.splitlines()
            self.assertEqual(len(table), 2)
            self.assertIn(one["id"], table[1])
            self.assertEqual(json.loads(self.add("--json").text)["prefixes"][0]["id"], one["id"])  # again
            server = self.start_with_store()
            expected = self.alone(QUESTIONS[1])
            answer, cached = self.ask(server, QUESTIONS[1])
            self.assertEqual(answer[0], expected[0])
            self.assertGreaterEqual(cached, DOCUMENT)
            self.stop(server)
            self.prefix("remove", one["id"])
            self.assertEqual(self.listed(), [])
            self.prefix("remove", one["id"], code=1)

    def test_remove_all(self):
        self.add()
        self.add("--system", "Be short.")
        self.assertEqual(len(self.listed()), 2)
        (self.store / ("kvzap-prefix-" + "0" * 16 + ".h5")).write_text("damaged")
        result = self.prefix("list")
        self.assertEqual(len(result.text.splitlines()), 3)
        self.assertIn("warning", result.err.decode())
        other = self.store / "notes.txt"
        other.write_text("of somebody else")
        self.prefix("remove", "--all")
        self.assertEqual(list(self.store.iterdir()), [other])

    def test_raw(self):
        """For completions, from a full cache any beginning."""
        document = self.folder / "document.txt"
        document.write_text(CASE["context"])
        self.prefix("add", "-m", MODEL, "--dtype", "f32", "--window", "32", "--raw", "-f", document)
        server = self.start_with_store()
        reply = server.post(PLAIN, {"prompt": CASE["context"] + " One", "max_tokens": 4, "kvzap": {"prune": "none"}})
        self.assertEqual(cached_tokens_of(reply) > DOCUMENT - 16, True)
        self.stop(server)

    def test_errors(self):
        for flags, words in ((["list", "-m", MODEL], "--model has no effect with kvzap prefix list"),
                             (["remove"], "needs the ids of states, or --all"),
                             (["remove", "12"], "is no id"),
                             (["add", "-m", MODEL], "no document"),
                             (["show"], "action")):
            result = run_command([KVZAP, "prefix", *flags, "--prefix-store", self.folder])
            self.assertEqual(result.code, 2, result)
            self.assertIn(words, result.errors[0])
        result = run_command([KVZAP, "prefix", "list"])
        self.assertEqual(result.code, 2)
        result = run_command([KVZAP, "prefix", "list", "--prefix-store", self.folder / "nowhere"])
        self.assertEqual(result.code, 1, result)


if __name__ == "__main__":
    unittest.main()
