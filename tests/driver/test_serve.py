"""kvzap serve from outside, over HTTP: the protocol, answers beside those of kvzap run, clients that go away, signals,
prompts that are kept, and what no client should send."""
import http.client
import json
import math
import os
import pathlib
import queue
import random
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import unittest

import harness
from harness import CASES, KVZAP, MLP, MODEL, PATIENCE, TestCase, descendants, on_ranks, run_command

CASE = CASES[0]
PRUNED = ["--surrogate", MLP, "--threshold=-3.4", "--window", "32", "--dtype", "f32"]
ENDLESS = ["--random-weights", "1", "-c", "2000000"]  # answers that somebody else has to end
ERROR_FIELDS = {"message", "type", "param", "code"}


def seed():
    """Of what is drawn at random; $KVZAP_SEED draws otherwise."""
    return int(os.environ.get("KVZAP_SEED", "1"))


class Server:
    """kvzap serve on a port of its own, until `stop`."""

    def __init__(self, *flags, ranks=0, model=MODEL, wrapper=()):
        command = [*wrapper, *on_ranks(ranks, [KVZAP, "serve", "-m", model, "--port", "0", *flags])]
        self.process = subprocess.Popen(list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                        stderr=subprocess.PIPE)
        self.ranks, self.lines = ranks, []
        ports = queue.Queue()

        def read():
            for line in self.process.stderr:
                self.lines.append(line.decode(errors="replace").rstrip("\n"))
                found = re.search(r"kvzap: listening on http://\S+:(\d+)$", self.lines[-1])
                if found:
                    ports.put(int(found.group(1)))
            ports.put(None)

        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()
        self.port = ports.get(timeout=PATIENCE)
        if self.port is None:
            self.process.wait(PATIENCE)
            if any("built without Boost" in line for line in self.lines):
                raise unittest.SkipTest("needs Boost")
            raise AssertionError(f"no server: {self.lines}")

    def rank0(self):
        """The process that listens, which mpiexec has started."""
        if not self.ranks or not harness.MPIEXEC:
            return self.process.pid
        for pid in descendants(self.process.pid):
            try:
                variables = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                program = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
            except OSError:
                continue
            if program == str(KVZAP) and {b"OMPI_COMM_WORLD_RANK=0", b"PMI_RANK=0", b"PMIX_RANK=0"} & set(variables):
                return pid
        return self.process.pid

    def send(self, number):
        os.kill(self.rank0(), number)

    def wait(self):
        """The exit status, after which the log is whole."""
        code = self.process.wait(PATIENCE)
        self.reader.join(PATIENCE)
        self.process.stderr.close()
        return code

    def stop(self, number=signal.SIGTERM):
        if self.process.poll() is None:
            self.send(number)
        return self.wait()

    def kill(self):
        """Where a test has failed, with all ranks."""
        if self.process.poll() is None:
            for pid in [*descendants(self.process.pid), self.process.pid]:
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def log(self):
        return "\n".join(self.lines)

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def request(self, method, path, body=None, headers={}):
        """Status, headers and body of the reply."""
        connection = self.connect()
        try:
            data = body if body is None or isinstance(body, (bytes, str)) else json.dumps(body)
            connection.request(method, path, data, {"Content-Type": "application/json", **headers} if body else headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def get(self, path):
        status, _, body = self.request("GET", path)
        assert status == 200, (path, status, body)
        return json.loads(body)

    def post(self, path, body, headers={}):
        status, _, reply = self.request("POST", path, body, headers)
        assert status == 200, (status, reply)
        return json.loads(reply)

    def open_stream(self, path, body):
        """A connection and its response, whose head has been read."""
        connection = self.connect()
        connection.request("POST", path, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            text = response.read()
            connection.close()
            raise AssertionError((response.status, text))
        return connection, response

    def stream(self, path, body):
        """Events of a stream that ends as it should."""
        connection, response = self.open_stream(path, body)
        try:
            assert response.headers["Content-Type"].startswith("text/event-stream"), response.headers
            events = list(events_of(response))
        finally:
            connection.close()
        assert events and events[-1] == "[DONE]", events[-1:]
        return events[:-1]

    def status(self):
        return self.get("/kvzap/status")

    def wait_for(self, what, condition):
        """Until /kvzap/status is as it should."""
        end = time.monotonic() + PATIENCE
        while True:
            status = self.status()
            if condition(status):
                return status
            if time.monotonic() > end:
                raise AssertionError(f"never {what}: {status}")
            time.sleep(0.005)

    def wait_until_idle(self):
        return self.wait_for("idle", lambda s: s["running"] == s["waiting"] == 0 and not s["sequences"])

    def metrics(self):
        _, _, body = self.request("GET", "/metrics")
        lines = [line for line in body.decode().splitlines() if line and not line.startswith("#")]
        return {line.split("{")[0].split()[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


def events_of(response):
    """Events of a stream as they come, parsed; [DONE] as it is."""
    for line in iter(response.readline, b""):
        line = line.rstrip(b"\r\n")
        if line.startswith(b"data: "):
            yield "[DONE]" if line == b"data: [DONE]" else json.loads(line[6:])
        elif line and not line.startswith(b":"):
            raise AssertionError(f"no event: {line!r}")


def asking(document, question=None, **fields):
    """A chat request, as `kvzap run -f document --question question`."""
    parts = [{"type": "text", "text": text} for text in (document, question) if text is not None]
    return {"messages": [{"role": "user", "content": parts}], "temperature": 0, **fields}


CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
ASK = asking(CASE["context"], CASE["question"], max_tokens=24)


def cached_tokens_of(reply):
    """Tokens of the prompt that were not run again."""
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def text_of(reply, choice=0):
    one = reply["choices"][choice]
    return one["message"]["content"] if "message" in one else one["text"]


def streamed(events, choice=0):
    """Text, reason and the last chunk of a choice."""
    text, last = "", None
    for event in events:
        for one in event["choices"]:
            if one["index"] != choice:
                continue
            text += one["delta"].get("content", "") if "delta" in one else one["text"]
            if one["finish_reason"]:
                last = one
    return text, last["finish_reason"], last


class ServerTest(TestCase):
    def start(self, *flags, **options):
        server = Server(*flags, **options)
        self.addCleanup(server.kill)
        return server

    def stop(self, server, code=0):
        """Drained, with nothing left of any sequence."""
        self.assertEqual(server.stop(), code, server.log())
        self.check_end(server)

    def check_end(self, server):
        (last,) = [line for line in server.lines if line.startswith("kvzap: stopped: ")]
        self.assertRegex(last, r"; 0 bytes of keys and values in use$")
        errors = [line for line in server.lines if "kvzap: error" in line]
        self.assertEqual(errors, [])
        return last

    def check_error(self, reply, status, param=None):
        """OpenAI's shape of an error."""
        code, headers, body = reply
        self.assertEqual(code, status, body)
        self.assertTrue(headers["Content-Type"].startswith("application/json"), headers)
        error = json.loads(body)["error"]
        self.assertEqual(set(error), ERROR_FIELDS)
        self.assertIsInstance(error["message"], str)
        self.assertTrue(error["message"])
        self.assertIsInstance(error["type"], str)
        if param is not None:
            self.assertEqual(error["param"], param, error)
        return error


class SharedServerTest(ServerTest):
    """Tests that may share a server."""

    FLAGS = PRUNED

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.server = Server(*cls.FLAGS)

    @classmethod
    def tearDownClass(cls):
        code = cls.server.stop()
        log = cls.server.log()
        assert code == 0 and "; 0 bytes of keys and values in use" in log and "kvzap: error" not in log, (code, log)
        super().tearDownClass()


class Protocol(SharedServerTest):
    def test_document_has_the_paths_and_methods(self):
        document = self.server.get("/openapi.json")
        self.assertEqual(document["openapi"], "3.1.0")
        paths = document["paths"]
        self.assertIn("/v1/chat/completions", paths)
        for path, operations in paths.items():
            name = {"/v1/models/{name}": "/v1/models/recall-4m"}.get(path, path)
            for method in ("GET", "HEAD", "POST", "DELETE", "PUT"):
                status = self.server.request(method, name, "{}" if method == "POST" else None)[0]
                if path == "/v1/responses/{name}" and method != "PUT" and method != "POST":
                    self.assertEqual(status, 404)  # none is stored
                else:
                    self.assertEqual(status == 405, method.lower() not in operations, (method, path))
                    self.assertNotEqual(status, 404, path)
        chat = document["components"]["schemas"]["ChatRequest"]["properties"]
        self.assertEqual(chat["model"]["enum"], ["recall-4m", None])

    def check_usage(self, usage):
        self.assertEqual(usage["total_tokens"], usage["prompt_tokens"] + usage["completion_tokens"])
        self.assertGreater(usage["prompt_tokens"], 0)
        self.assertLessEqual(0, usage["prompt_tokens_details"]["cached_tokens"])
        self.assertLess(usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])

    def check_pruned(self, one):
        self.assertEqual(set(one), {"evict_ratio", "kv_bytes", "full_kv_bytes"})
        self.assertGreater(one["evict_ratio"], 0.05)
        self.assertLess(one["evict_ratio"], 1)
        self.assertAlmostEqual(one["kv_bytes"], one["full_kv_bytes"] * (1 - one["evict_ratio"]), delta=1)

    def check_frame(self, frame, kind, name):
        self.assertRegex(frame["id"], rf"^{name}-\d+$")
        self.assertEqual((frame["object"], frame["model"]), (kind, "recall-4m"))
        self.assertIsInstance(frame["created"], int)

    def test_what_there_is_to_see(self):
        self.assertEqual(self.server.get("/health"), {"status": "ok"})
        models = self.server.get("/v1/models")
        self.assertEqual((models["object"], [model["id"] for model in models["data"]]), ("list", ["recall-4m"]))
        self.assertEqual(models["data"][0]["object"], "model")
        status, headers, page = self.server.request("GET", "/")
        self.assertEqual(status, 200)
        self.assertTrue(headers["Content-Type"].startswith("text/html"))
        self.assertTrue(page)
        self.server.post(CHAT, ASK)
        self.server.wait_until_idle()
        status, headers, text = self.server.request("GET", "/metrics")
        self.assertEqual(status, 200)
        self.assertTrue(headers["Content-Type"].startswith("text/plain"))
        for line in text.decode().splitlines():
            self.assertRegex(line, r'^(# (HELP|TYPE) [\w:]+ .+|[\w:]+(\{(\w+="[^"]*",?)+\})? [-+.\de]+)$')
        metrics = self.server.metrics()
        for name in ("requests_finished_total", "steps_total", "generation_tokens_total", "step_seconds_total"):
            self.assertGreater(metrics[f"kvzap_{name}"], 0)
        self.assertEqual(metrics["kvzap_requests_running"], 0)
        there = self.server.status()
        self.assertEqual(there["model"], "recall-4m")
        self.assertEqual(there["max_tokens"], 4096)
        self.assertEqual((there["running"], there["waiting"], there["sequences"]), (0, 0, []))
        self.assertGreater(there["prefixes"], 0)
        self.assertGreater(there["kv_allocated"], 0)
        self.assertLess(there["keep_ratio"], 1)

    def test_head(self):
        connection = self.server.connect()
        connection.request("HEAD", "/health")
        response = connection.getresponse()
        self.assertEqual((response.status, response.read()), (200, b""))
        connection.close()

    def test_status_of_a_sequence(self):
        server = self.start(*ENDLESS, *PRUNED)
        connection, response = server.open_stream(CHAT, {**ASK, "max_tokens": 10**6, "ignore_eos": True, "n": 2})
        ids = {event["id"] for _, event in zip(range(5), events_of(response))}
        there = server.wait_for("two that decode", lambda s: [q["phase"] for q in s["sequences"]] == 2 * ["decode"]
                                and all(q["evict_ratio"] > 0 for q in s["sequences"]))
        self.assertEqual(there["running"], 2)
        for choice, one in enumerate(there["sequences"]):
            self.assertEqual(ids, {f"chatcmpl-{one['request']}"})
            self.assertEqual(one["choice"], choice)
            self.assertGreaterEqual(one["tokens"], 289 + one["new_tokens"] - 1)
            self.assertGreater(one["new_tokens"], 0)
            self.assertLess(one["kv_bytes"], one["full_kv_bytes"])
        later = server.wait_for("more", lambda s: s["sequences"][0]["new_tokens"] > there["sequences"][0]["new_tokens"])
        self.assertGreater(later["sequences"][0]["full_kv_bytes"], there["sequences"][0]["full_kv_bytes"])
        connection.close()
        server.wait_until_idle()
        self.stop(server)

    def test_status_of_a_long_step(self):
        """A prompt under a budget runs in one step: the server does not look idle meanwhile."""
        server = self.start(*ENDLESS, "--policy", "snapkv", "--evict-ratio", "0.5")
        connection = server.connect()
        connection.request("POST", PLAIN, json.dumps({"prompt": 5000 * [5], "max_tokens": 2}))
        there = server.wait_for("a prompt that runs", lambda s: s["running"] == 1)
        self.assertEqual([one["phase"] for one in there["sequences"]], ["prefill"])
        self.assertEqual(connection.getresponse().status, 200)
        connection.close()
        self.stop(server)

    def test_tokens(self):
        for text in ("The code is 5.", CASE["context"], "", " a\n\n b", "Grüße, 日本 \U0001f600"):
            tokens = self.server.post("/tokenize", {"content": text})["tokens"]
            self.assertTrue(all(isinstance(token, int) for token in tokens))
            self.assertEqual(self.server.post("/detokenize", {"tokens": tokens}), {"content": text})
            special = self.server.post("/tokenize", {"content": text, "add_special": True})["tokens"]
            self.assertEqual(special[len(special) - len(tokens) :], tokens)
        for path, body, param in (("/tokenize", {"content": 5}, "content"), ("/tokenize", {}, "content"),
                                  ("/detokenize", {"tokens": ["a"]}, "tokens"), ("/detokenize", {}, "tokens"),
                                  ("/detokenize", {"tokens": [-1]}, "tokens")):
            self.check_error(self.server.request("POST", path, body), 400, param)

    def test_chat(self):
        reply = self.server.post(CHAT, ASK)
        self.check_frame(reply, "chat.completion", "chatcmpl")
        (choice,) = reply["choices"]
        self.assertEqual(choice["index"], 0)
        self.assertEqual(choice["message"], {"role": "assistant", "content": CASE["expected"]})
        self.assertEqual(choice["finish_reason"], "stop")
        self.assertIsNone(choice["logprobs"])
        self.check_usage(reply["usage"])
        self.check_pruned(choice["kvzap"])
        self.assertEqual(reply["kvzap"], choice["kvzap"])
        again = self.server.post(CHAT, ASK)
        self.assertEqual(text_of(again), CASE["expected"])
        self.assertGreater(int(again["id"].split("-")[1]), int(reply["id"].split("-")[1]))

    def test_chat_in_a_stream(self):
        whole = self.server.post(CHAT, ASK)
        for includes in (True, False):
            events = self.server.stream(CHAT, {**ASK, "stream_options": {"include_usage": includes}})
            for event in events:
                self.check_frame(event, "chat.completion.chunk", "chatcmpl")
            self.assertEqual(len({event["id"] for event in events}), 1)
            self.assertEqual(events[0]["choices"][0]["delta"].get("role"), "assistant")
            text, reason, last = streamed(events)
            self.assertEqual((text, reason), (CASE["expected"], "stop"))
            self.assertEqual(last["kvzap"], whole["choices"][0]["kvzap"])
            usages = [event["usage"] for event in events if event.get("usage")]
            self.assertEqual(len(usages), int(includes))
            if includes:
                self.assertEqual(events[-1]["choices"], [])
                self.check_usage(usages[0])
                self.assertEqual(usages[0]["completion_tokens"], whole["usage"]["completion_tokens"])
            more = [one for event in events for one in event["choices"] if one is not last]
            self.assertTrue(all(one["finish_reason"] is None for one in more))

    def test_completions(self):
        text = CASE["context"] + CASE["question"]
        ids = self.server.post("/tokenize", {"content": text})["tokens"]
        fields = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
        seen = []
        for prompt in (text, ids, [text], [ids]):
            reply = self.server.post(PLAIN, {**fields, "prompt": prompt})
            self.check_frame(reply, "text_completion", "cmpl")
            (choice,) = reply["choices"]
            self.assertEqual((choice["index"], choice["finish_reason"]), (0, "length"))
            self.assertEqual(reply["usage"]["completion_tokens"], 20)
            self.assertEqual(reply["usage"]["prompt_tokens"], len(ids))
            self.check_usage(reply["usage"])
            self.check_pruned(choice["kvzap"])
            self.check_pruned(reply["kvzap"])
            seen.append(choice["text"])
        self.assertEqual(len(set(seen)), 1)
        events = self.server.stream(PLAIN, {**fields, "prompt": ids})
        self.check_frame(events[0], "text_completion", "cmpl")
        self.assertEqual(streamed(events)[:2], (seen[0], "length"))
        echo = {**fields, "prompt": text, "echo": True}
        self.assertEqual(text_of(self.server.post(PLAIN, echo)), text + seen[0])
        self.assertEqual(streamed(self.server.stream(PLAIN, echo))[0], text + seen[0])
        # OpenAI's defaults.
        few = self.server.post(PLAIN, {"prompt": text, "ignore_eos": True})
        self.assertEqual(few["usage"]["completion_tokens"], 16)

    def test_several_prompts(self):
        """Answers to each prompt are those to a request of its own, and are numbered prompt by prompt."""
        texts = [case["context"] + case["question"] for case in CASES[:2]] + ["The sky is"]
        ids = [self.server.post("/tokenize", {"content": text})["tokens"] for text in texts]
        for fields in ({"temperature": 0, "echo": True}, {"temperature": 3.0, "seed": 7, "n": 2, "stop": "e"}):
            fields = {**fields, "max_tokens": 12, "ignore_eos": True}
            alone = [self.server.post(PLAIN, {**fields, "prompt": prompt}) for prompt in ids]
            expected = [(choice["text"], choice["finish_reason"]) for reply in alone for choice in reply["choices"]]
            self.assertGreater(len(set(expected)), 2)
            for prompts in (texts, ids):
                reply = self.server.post(PLAIN, {**fields, "prompt": prompts})
                self.check_frame(reply, "text_completion", "cmpl")
                self.assertEqual([choice["index"] for choice in reply["choices"]], list(range(len(expected))))
                self.assertEqual([(one["text"], one["finish_reason"]) for one in reply["choices"]], expected)
                self.check_usage(reply["usage"])
                for count in ("prompt_tokens", "completion_tokens"):
                    self.assertEqual(reply["usage"][count], sum(one["usage"][count] for one in alone))
            events = self.server.stream(PLAIN, {**fields, "prompt": texts, "stream_options": {"include_usage": True}})
            self.assertEqual([streamed(events, i)[:2] for i in range(len(expected))], expected)
            self.assertEqual(events[-1]["usage"]["prompt_tokens"], reply["usage"]["prompt_tokens"])
            self.assertEqual(events[-1]["usage"]["completion_tokens"], reply["usage"]["completion_tokens"])
        logprobs = self.server.post(PLAIN, {"prompt": texts, "logprobs": 1, "max_tokens": 3, "ignore_eos": True})
        self.assertEqual([len(choice["logprobs"]["tokens"]) for choice in logprobs["choices"]], [3, 3, 3])

    def test_lengths(self):
        for field in ("max_tokens", "max_completion_tokens"):
            reply = self.server.post(CHAT, {**asking(CASE["context"], CASE["question"]), field: 3})
            self.assertEqual((reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]), (3, "length"))
            self.assertTrue(CASE["expected"].startswith(text_of(reply)))
        # The context's end.
        ids = self.server.post("/tokenize", {"content": " the" * 4090})["tokens"][:4090]
        reply = self.server.post(PLAIN, {"prompt": ids, "max_tokens": 100, "ignore_eos": True})
        self.assertEqual(reply["choices"][0]["finish_reason"], "length")
        self.assertIn(4090 + reply["usage"]["completion_tokens"], (4096, 4097))
        self.check_error(self.server.request("POST", PLAIN, {"prompt": 2 * ids}), 400, "prompt")

    def test_several_answers(self):
        # A temperature at which a recall model has more than one thing to say.
        ask = {**ASK, "temperature": 3.0, "seed": 7, "max_tokens": 12, "ignore_eos": True}
        alone = [text_of(self.server.post(CHAT, {**ask, "seed": 7 + i})) for i in range(3)]
        self.assertEqual(len(set(alone)), 3)
        reply = self.server.post(CHAT, {**ask, "n": 3})
        self.assertEqual([choice["index"] for choice in reply["choices"]], [0, 1, 2])
        self.assertEqual([text_of(reply, i) for i in range(3)], alone)
        self.assertEqual(reply["usage"]["completion_tokens"], 36)
        self.check_usage(reply["usage"])
        for choice in reply["choices"]:
            self.check_pruned(choice["kvzap"])
        events = self.server.stream(CHAT, {**ask, "n": 3, "stream_options": {"include_usage": True}})
        self.assertEqual([streamed(events, i)[0] for i in range(3)], alone)
        self.assertEqual(events[-1]["usage"]["completion_tokens"], 36)
        self.assertEqual([text_of(self.server.post(CHAT, ask)) for _ in range(2)], 2 * alone[:1])
        # One each without a seed; greedily all are the same.
        free = {key: value for key, value in ask.items() if key != "seed"}
        self.assertGreater(len({text_of(self.server.post(CHAT, free)) for _ in range(8)}), 1)
        greedy = self.server.post(CHAT, {**ASK, "n": 4, "seed": 3})
        self.assertEqual([text_of(greedy, i) for i in range(4)], 4 * [CASE["expected"]])

    def test_narrow_sampling_is_greedy(self):
        for field in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"top_p": 0}):
            reply = self.server.post(CHAT, {**ASK, "temperature": 2.0, "seed": 5, **field})
            self.assertEqual(text_of(reply), CASE["expected"], field)

    def test_penalties(self):
        server = self.start(*ENDLESS, "--dtype", "f32")  # of weights that prefer nothing by much
        ask = {"prompt": "The code is 5.", "ignore_eos": True, "max_tokens": 40, "temperature": 0}
        plain = text_of(server.post(PLAIN, ask))
        for field in ({"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 50.0}):
            self.assertNotEqual(text_of(server.post(PLAIN, {**ask, **field})), plain, field)
        self.assertEqual(text_of(server.post(PLAIN, {**ask, "presence_penalty": 0, "repetition_penalty": 1})), plain)
        self.stop(server)

    def test_stop(self):
        answer = CASE["expected"]  # The special magic number for victor is 4467.
        whole = self.server.post(CHAT, ASK)
        for stop, text in ((" for", answer[: answer.index(" for")]), (["xyz", "ma", "4"], answer[: answer.index("ma")]),
                           ("number for victor is", answer[: answer.index("number")]), (["T"], ""), ("zzz", answer),
                           (answer + "?", answer)):
            reply = self.server.post(CHAT, {**ASK, "stop": stop})
            self.assertEqual((text_of(reply), reply["choices"][0]["finish_reason"]), (text, "stop"), stop)
            events = self.server.stream(CHAT, {**ASK, "stop": stop, "stream_options": {"include_usage": True}})
            self.assertEqual(streamed(events)[:2], (text, "stop"), stop)
            tokens = reply["usage"]["completion_tokens"]
            self.assertEqual(events[-1]["usage"]["completion_tokens"], tokens)
            if len(text) < len(answer) - 10:
                self.assertLess(tokens, whole["usage"]["completion_tokens"])
        self.server.wait_until_idle()

    def test_logprobs(self):
        ask = {**ASK, "logprobs": True, "top_logprobs": 3}
        reply = self.server.post(CHAT, ask)
        content = reply["choices"][0]["logprobs"]["content"]
        self.check_chat_logprobs(content)
        self.assertIn(len(content), (reply["usage"]["completion_tokens"], reply["usage"]["completion_tokens"] - 1))
        pieces = []
        for event in self.server.stream(CHAT, ask):
            for one in event["choices"]:
                pieces += (one["logprobs"] or {"content": []})["content"]
        self.assertEqual([one["token"] for one in pieces], [one["token"] for one in content])
        for one, other in zip(pieces, content):
            self.assertAlmostEqual(one["logprob"], other["logprob"], delta=1e-3)
        none = self.server.post(CHAT, {**ASK, "logprobs": True})["choices"][0]["logprobs"]["content"]
        self.assertTrue(all(one["top_logprobs"] == [] for one in none))

        prompt = {"prompt": CASE["context"], "max_tokens": 8, "temperature": 0, "logprobs": 2}
        choice = self.server.post(PLAIN, prompt)["choices"][0]
        lists = choice["logprobs"]
        self.assertEqual("".join(lists["tokens"]), choice["text"])
        offset = 0
        for i, token in enumerate(lists["tokens"]):
            self.assertEqual(lists["text_offset"][i], offset)
            offset += len(token)
            self.assertLessEqual(lists["token_logprobs"][i], 0)
            self.assertAlmostEqual(max(lists["top_logprobs"][i].values()), lists["token_logprobs"][i], places=5)

    def check_chat_logprobs(self, content):
        spoken = b"".join(bytes(one["bytes"]) for one in content)
        self.assertEqual(spoken.decode().removesuffix("<|im_end|>"), CASE["expected"])
        for one in content:
            self.assertLessEqual(one["logprob"], 0)
            top = one["top_logprobs"]
            self.assertEqual(len(top), 3)
            self.assertEqual([t["logprob"] for t in top], sorted((t["logprob"] for t in top), reverse=True))
            self.assertEqual((top[0]["token"], top[0]["logprob"]), (one["token"], one["logprob"]))
            self.assertLessEqual(sum(math.exp(t["logprob"]) for t in top), 1 + 1e-5)

    def test_what_is_pruned(self):
        full = self.server.post(CHAT, {**ASK, "kvzap": {"prune": "none"}})
        self.assertEqual(full["kvzap"]["evict_ratio"], 0)
        self.assertEqual(full["kvzap"]["kv_bytes"], full["kvzap"]["full_kv_bytes"])
        ratios = []
        for threshold in (-9, -4, -3, 1):
            reply = self.server.post(CHAT, {**ASK, "kvzap": {"threshold": threshold}})
            ratios.append(reply["kvzap"]["evict_ratio"])
        self.assertEqual(ratios, sorted(ratios))
        self.assertLess(ratios[0] + 0.3, ratios[-1])
        standard = self.server.post(CHAT, ASK)["kvzap"]
        self.assertEqual(self.server.post(CHAT, {**ASK, "kvzap": {"threshold": -3.4, "prune": "prefill"}})["kvzap"],
                         standard)
        answered = {**ASK, "ignore_eos": True, "max_tokens": 100}
        prefill, always = (
            self.server.post(CHAT, {**answered, "kvzap": {"prune": prune, "threshold": 1}})["kvzap"]["evict_ratio"]
            for prune in ("prefill", "always")
        )
        self.assertGreater(always, prefill + 0.05)

    def test_connection_stays(self):
        connection = self.server.connect()
        for path, body in ((CHAT, ASK), (CHAT, {**ASK, "stream": True}), (PLAIN, {"prompt": 5}), (CHAT, ASK)):
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            where = connection.sock
            response = connection.getresponse()
            body = response.read()
            self.assertEqual(response.status, 200 if path == CHAT else 400, body)
            if path == CHAT:
                self.assertIs(connection.sock, where)
        connection.close()

    def test_body_in_chunks(self):
        connection = self.server.connect()
        text = json.dumps(ASK).encode()
        pieces = [text[i : i + 100] for i in range(0, len(text), 100)]
        connection.request("POST", CHAT, iter(pieces), {"Content-Type": "application/json"}, encode_chunked=True)
        response = connection.getresponse()
        self.assertEqual(response.status, 200)
        self.assertEqual(text_of(json.loads(response.read())), CASE["expected"])
        connection.close()


class Errors(SharedServerTest):
    KEYS = ["secret-1", "secret-2"]

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        file = pathlib.Path(folder.name) / "keys"
        file.write_text("\n".join(cls.KEYS) + "\n")
        file.chmod(0o600)
        cls.FLAGS = [*PRUNED, "--api-key-file", file, "--alias", "some model"]
        super().setUpClass()

    def ask(self, method, path, body=None, key=KEYS[0], **headers):
        return self.server.request(method, path, body, {**({"Authorization": f"Bearer {key}"} if key else {}),
                                                        **headers})

    def bad(self, body, param=None, path=CHAT):
        return self.check_error(self.ask("POST", path, body), 400, param)

    def test_keys(self):
        for path in ("/", "/health"):
            self.assertEqual(self.ask("GET", path, key=None)[0], 200)
        every = [("GET", path) for path in ("/v1/models", "/metrics", "/kvzap/status", "/none")]
        every += [("POST", path) for path in (CHAT, PLAIN, "/tokenize", "/detokenize")]
        for method, path in every:
            body = None if method == "GET" else ASK
            guesses = [{"Authorization": f"Bearer {key}"} for key in ("secret", "secret-12", "secret-1\tx")]
            for headers in ({}, {"Authorization": "Bearer "}, {"Authorization": "Basic secret-1"},
                            {"Authorization": "secret-1"}, *(guesses if path in ("/none", CHAT) else [])):
                error = self.check_error(self.server.request(method, path, body, headers), 401)
                self.assertNotIn("secret", error["message"])
        for key in self.KEYS:
            status, _, body = self.ask("GET", "/v1/models", key=key)
            self.assertEqual((status, json.loads(body)["data"][0]["id"]), (200, "some model"))
            self.assertEqual(self.ask("POST", CHAT, {**ASK, "model": "some model"}, key=key)[0], 200)
        self.assertFalse(any(key in self.server.log() for key in self.KEYS))

    def test_paths_and_methods(self):
        for method, path in (("GET", "/none"), ("POST", "/none"), ("GET", "/v1"), ("POST", "/v1/images"),
                             ("GET", "/kvzap"), ("GET", "/../etc/passwd"), ("GET", "/%2e%2e/%2e%2e/etc/passwd")):
            self.check_error(self.ask(method, path, {} if method == "POST" else None), 404)
        for method, path, meant in (("POST", "/chat/completions", CHAT), ("POST", "/api/chat", CHAT),
                                    ("POST", "/v1/chat/completions/", CHAT), ("POST", "/v1/chat/completion", CHAT),
                                    ("POST", "/completion", PLAIN), ("GET", "/models", "/v1/models")):
            error = self.check_error(self.ask(method, path, {} if method == "POST" else None), 404)
            self.assertEqual(error["message"], f"unknown path; expected {meant}")
        for method, path in (("GET", CHAT), ("GET", PLAIN), ("GET", "/tokenize"), ("POST", "/health"),
                             ("POST", "/v1/models"), ("DELETE", CHAT), ("PUT", CHAT), ("PATCH", "/kvzap/status"),
                             ("POST", "/")):
            self.check_error(self.ask(method, path, ASK if method != "GET" else None), 405)

    def test_bodies(self):
        for body in ("", "{", "[]", "5", "null", '"text"', "{}{}", "{'a': 1}", "\ufeff{}", '{"a": NaN}'):
            self.check_error(self.ask("POST", CHAT, body.encode() or b" "), 400)
        for body in (b"\xff", b'{"prompt": "\xff"}', b'{"prompt": "\xc0\x80"}', b'{"prompt": "a\x00b"}',
                     b'{"prompt": "\\ud800"}', b"\x00"):
            self.check_error(self.ask("POST", PLAIN, body), 400)
        for deep in (b"[" * 100000, b'{"a":[' * 1000):
            self.assertLess(len(self.check_error(self.ask("POST", PLAIN, deep), 400)["message"]), 160)

    def test_too_large(self):
        size = (64 << 20) + 1
        connection = self.server.connect()
        connection.putrequest("POST", CHAT)
        connection.putheader("Authorization", f"Bearer {self.KEYS[0]}")
        connection.putheader("Content-Length", str(size))
        connection.endheaders()
        try:
            for begin in range(0, size, 1 << 20):
                connection.send(b" " * min(1 << 20, size - begin))
        except OSError:
            pass  # it need not be read to its end
        response = connection.getresponse()
        self.check_error((response.status, response.headers, response.read()), 413)
        connection.close()

    def test_fields(self):
        for changes, param in [
            ({"model": 5}, "model"),
            ({"messages": []}, "messages"), ({"messages": None}, "messages"), ({"messages": "text"}, "messages"),
            ({"messages": [5]}, "messages[0]"), ({"messages": [{"role": "user"}]}, "messages[0].content"),
            ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
            ({"messages": [{"content": "x"}]}, "messages[0].role"),
            ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
            ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
             "messages[0].content"),
            ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": -2}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
            ({"max_tokens": "5"}, "max_tokens"), ({"max_tokens": 10**30}, "max_tokens"),
            ({"max_completion_tokens": 0}, "max_completion_tokens"),
            ({"temperature": -0.1}, "temperature"), ({"temperature": "hot"}, "temperature"),
            ({"temperature": 1e308}, "temperature"), ({"temperature": []}, "temperature"),
            ({"top_p": 1.5}, "top_p"), ({"top_p": -1}, "top_p"), ({"top_k": -2}, "top_k"), ({"top_k": 0.5}, "top_k"),
            ({"min_p": 2}, "min_p"), ({"presence_penalty": 3}, "presence_penalty"),
            ({"frequency_penalty": -3}, "frequency_penalty"), ({"repetition_penalty": 0}, "repetition_penalty"),
            ({"seed": "x"}, "seed"), ({"seed": 1.5}, "seed"), ({"n": 0}, "n"), ({"n": 1000}, "n"), ({"n": "2"}, "n"),
            ({"stop": 5}, "stop"), ({"stop": [5]}, "stop"), ({"stop": ""}, "stop"), ({"stop": 100 * ["a"]}, "stop"),
            ({"stream": "yes"}, "stream"), ({"stream_options": 5}, "stream_options"), ({"ignore_eos": 1}, "ignore_eos"),
            ({"logprobs": 3}, "logprobs"), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"top_logprobs": 3}, "top_logprobs"), ({"logit_bias": {"5": 101}}, "logit_bias"),
            ({"stop_token_ids": [1024]}, "stop_token_ids"), ({"min_tokens": "x"}, "min_tokens"),
            ({"grammar": "root ::= x"}, "grammar"), ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": [{"type": "function"}]}, "tools[0]"), ({"response_format": {"type": "xml"}},
                                                           "response_format.type"),
            ({"kvzap": 5}, "kvzap"), ({"kvzap": {"other": 1}}, "kvzap"),
            ({"kvzap": {"threshold": "x"}}, "kvzap.threshold"),
            ({"kvzap": {"threshold": 1, "evict_ratio": 0.5}}, "kvzap"), ({"kvzap": {"prune": "some"}}, "kvzap.prune"),
            ({"kvzap": {"prune": "none", "threshold": 1}}, "kvzap"),
        ]:
            with self.subTest(changes):
                self.bad({**ASK, **changes}, param)
        for changes, param in [
            ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt[0]"),
            ({"prompt": {}}, "prompt"), ({"prompt": [1.5]}, "prompt"), ({"prompt": [-1]}, "prompt"),
            ({"prompt": [10**20]}, "prompt"), ({"prompt": ["a", 5]}, "prompt[1]"), ({"prompt": [1024]}, "prompt"),
            ({"prompt": 129 * ["a"]}, "prompt"), ({"prompt": ["a", [1024]]}, "prompt[1]"),
            ({"prompt": [["a", 5]]}, "prompt[0]"),
            ({"prompt": ""}, "prompt"), ({"logprobs": 21}, "logprobs"), ({"best_of": 3}, "best_of"),
            ({"suffix": "x"}, "suffix"),
        ]:
            with self.subTest(changes):
                self.bad({"prompt": "x", **changes}, param, PLAIN)
        for ids in ([-1], [1024], [2**40], [2**64]):
            self.bad({"tokens": ids}, "tokens", "/detokenize")
        self.assertIn("expected an integer from 1 to 16", self.bad({**ASK, "n": 0}, "n")["message"])
        self.assertIn("expected an integer from 1 to 16", self.bad({**ASK, "n": 17}, "n")["message"])
        error = self.check_error(self.ask("POST", CHAT, {**ASK, "model": "another"}), 404, "model")
        self.assertEqual(error["code"], "model_not_found")
        self.bad({"max_tokens": 5}, "messages")
        self.bad({"max_tokens": 5}, "prompt", PLAIN)
        # An empty request field is no error, nor is an unknown field.
        status, _, body = self.ask("POST", CHAT, {**ASK, "tools": [], "logit_bias": {},
                                                  "response_format": {"type": "text"}, "user": "u", "stop": None,
                                                  "n": None, "metadata": {"a": 1}})
        self.assertEqual((status, text_of(json.loads(body))), (200, CASE["expected"]))

    def test_minus_one(self):
        """As the flags --seed and -n of the program have it: a random seed, no limit."""
        ask = {**ASK, "seed": -1, "temperature": 5, "max_tokens": 12}
        texts = {self.ask("POST", CHAT, ask)[2].split(b'"content":')[1][:40] for _ in range(3)}
        self.assertGreater(len(texts), 1)
        status, _, body = self.ask("POST", PLAIN, {"prompt": "x", "max_tokens": -1, "ignore_eos": True})
        self.assertEqual((status, json.loads(body)["usage"]["total_tokens"]), (200, 4097))

    def test_log(self):
        """A line for each request to an API path, and why it was refused."""
        for path, headers in (("/v1/models", {}), ("/v1/models", {"Host": "a", "Origin": "http://b"}), ("/none", {})):
            self.ask("GET", path, **headers)
        self.ask("GET", "/v1/models", key="wrong")
        self.ask("PUT", CHAT)
        for wanted in ("GET /v1/models 200$", "GET /v1/models 403 the request comes from a page of another server",
                       "GET /none 404 unknown path", "GET /v1/models 401 missing or invalid API key",
                       "PUT /v1/chat/completions 405 the method is PUT; expected POST"):
            end = time.monotonic() + PATIENCE
            while not re.search(" " + wanted, self.server.log(), re.M):
                self.assertLess(time.monotonic(), end, wanted)
                time.sleep(0.01)

    def test_nothing_to_prune_by(self):
        server = self.start("--dtype", "f32")
        for wish in ({"threshold": -3}, {"evict_ratio": 0.5}, {"prune": "always"}):
            self.check_error(server.request("POST", CHAT, {**ASK, "kvzap": wish}), 400)
        reply = server.post(CHAT, {**ASK, "kvzap": {"prune": "none"}})
        self.assertEqual((text_of(reply), reply["kvzap"]["evict_ratio"]), (CASE["expected"], 0))
        self.stop(server)

    def test_command_line(self):
        for flags, part in ((["--port", "70000"], "--port"), (["--kv-memory", "1B"], "--kv-memory"),
                            (["--host", "no.such.host.invalid"], "no.such.host.invalid:0: "),
                            (["--host", "999.1.1.1"], "999.1.1.1:0: not an address of this machine"),
                            (["--api-key-file", "/dev/zero"], "/dev/zero: expected a regular file"), (["--max-queue", "0"], "--max-queue"),
                            (["--api-key-file", self.folder / "none"], "none"), (["-p", "text"], "-p"),
                            (["--drain-seconds", "-1"], "--drain-seconds")):
            result = run_command([KVZAP, "serve", "-m", MODEL, "--port", "0", *flags])
            self.fail_with(result, part)
        taken = run_command([KVZAP, "serve", "-m", MODEL, "--port", self.server.port])
        self.fail_with(taken, str(self.server.port))


class Job:
    """A request, what `kvzap run` answers to it, and what is done with it."""

    def __init__(self, number, body, expected):
        self.number, self.body, self.expected = number, body, expected
        self.stream, self.events = False, None  # after how many its client goes away


class Answers(ServerTest):
    """Many clients at once get the answers that kvzap run gives to each alone."""

    QUESTIONS = [None, "\n\nWhat is the special magic number for ember?",
                 " Hm? What is it that comes after all of this, and is long enough to leave the window?"]
    MODES = [("none", None), ("prefill", "-3.4"), ("always", "-3.4"), ("prefill", "-4.3")]
    expected = None

    @classmethod
    def answers(cls):
        """[(body, what a run says of it)], which does not depend on ranks."""
        if Answers.expected is not None:
            return Answers.expected
        Answers.expected = []
        for case in CASES:
            questions = [question or case["question"] for question in cls.QUESTIONS]
            for prune, threshold in cls.MODES:
                flags = ["-m", MODEL, "-p", case["context"], "--dtype", "f32", "-n", case["max_new_tokens"],
                         "--ignore-eos"]
                flags += [flag for question in questions for flag in ("--question", question)]
                if prune != "none":
                    flags += ["--surrogate", MLP, f"--threshold={threshold}", "--window", "32", "--prune", prune]
                result = harness.kvzap(*flags, "--json", "-", "-q")
                assert result.code == 0, result
                report = json.loads(result.out)
                wish = {"prune": prune, **({} if threshold is None else {"threshold": float(threshold)})}
                for question, answer in zip(questions, report["answers"]):
                    body = asking(case["context"], question, max_tokens=case["max_new_tokens"], ignore_eos=True,
                                  kvzap=wish)
                    Answers.expected.append((body, {
                        "text": answer["text"], "new_tokens": answer["new_tokens"],
                        "prompt_tokens": report["context"]["tokens"] + answer["question_tokens"],
                        "evict_ratio": answer["cache"]["evict_ratio"],
                    }))
        return Answers.expected

    def jobs(self, count, draw):
        """So many that are answered, and a third more whose clients go away."""
        answers = self.answers()
        jobs = []
        for number in range(count + count // 3):
            job = Job(number, *answers[number % len(answers)] if count >= len(answers) else draw.choice(answers))
            job.stream = draw.random() < 0.5
            if number >= count:
                job.stream, job.events = True, draw.randrange(job.expected["new_tokens"])
            jobs.append(job)
        draw.shuffle(jobs)
        return jobs

    def run_job(self, server, job):
        if job.events is not None:
            connection, response = server.open_stream(CHAT, job.body)
            for _ in zip(range(job.events), events_of(response)):
                pass
            connection.close()
            return None
        if job.stream:
            events = server.stream(CHAT, {**job.body, "stream_options": {"include_usage": True}})
            text, _, last = streamed(events)
            usage, pruned = events[-1]["usage"], last["kvzap"]
        else:
            reply = server.post(CHAT, job.body)
            text, usage, pruned = text_of(reply), reply["usage"], reply["kvzap"]
        return {"text": text, "new_tokens": usage["completion_tokens"], "prompt_tokens": usage["prompt_tokens"],
                "evict_ratio": pruned["evict_ratio"]}

    def check(self, count, ranks, *flags, clients=16, dtype="f32", others=0):
        """`others`: how many answers may be others."""
        tolerance = 1e-9 if dtype == "f32" else 2e-3  # a score near the threshold may round to its other side
        draw = random.Random(f"{seed()} {ranks} {flags}")
        jobs = queue.SimpleQueue()
        for job in self.jobs(count, draw):
            jobs.put(job)
        server = self.start(*PRUNED[:-1], dtype, *flags, ranks=ranks)
        wrong = []

        def client():
            while True:
                try:
                    job = jobs.get_nowait()
                except queue.Empty:
                    return
                try:
                    found = self.run_job(server, job)
                except Exception as error:
                    found = repr(error)
                if job.events is None and found != {**job.expected, "evict_ratio": same(found, job.expected, tolerance)}:
                    wrong.append((job.number, job.body["messages"][0]["content"][-1], job.body.get("kvzap"), found,
                                  job.expected))

        threads = [threading.Thread(target=client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertLessEqual(len(wrong), others, f"seed {seed()}: {wrong}\n{server.log()}")
        if wrong:
            print(f"{ranks} ranks, {dtype}: {len(wrong)} of {count} answers are others")
        server.wait_until_idle()
        counts = server.metrics()
        self.assertEqual(counts["kvzap_requests_failed_total"], 0)
        self.stop(server)
        return counts

    def test_one_process(self):
        self.assertEqual(len(self.answers()), 36)
        self.check(36, 0)

    def test_on_ranks(self):
        for ranks, count in ((1, 12), (2, 18), (4, 8)):
            with self.subTest(ranks=ranks):
                self.check(count, ranks)

    def test_small_steps(self):
        """Prompts in pieces, a few sequences at a time."""
        self.check(18, 0, "--max-batch-tokens", "24", "--max-sequences", "5")

    def test_little_memory(self):
        """Earlier prompts and whole sequences have to go for others."""
        counts = self.check(24, 0, "--kv-memory", "9MiB", "--page-rows", "16")
        self.assertGreater(counts["kvzap_prefixes_evicted_total"], 0)

    def test_preemption(self):
        """Answers that begin together grow beyond the memory: the newest ones are computed again, with the same text."""
        body = {"prompt": "The sky is", "max_tokens": 128, "ignore_eos": True, "temperature": 0}
        server = self.start("--dtype", "f32", "--window", "32", "--page-rows", "16", "--kv-memory", "2MB")
        alone = text_of(server.post(PLAIN, body))
        self.assertEqual(server.metrics()["kvzap_preemptions_total"], 0)
        # Choices of one request share its step, whatever the speed of client and server.
        together = server.post(PLAIN, {**body, "n": 6})
        self.assertEqual([text_of(together, choice) for choice in range(6)], 6 * [alone])
        self.assertGreater(server.metrics()["kvzap_preemptions_total"], 0)
        self.stop(server)

    def test_too_little_memory(self):
        server = self.start(*PRUNED, "--kv-memory", "3MiB", "--page-rows", "16")
        long = asking(CASES[2]["context"], CASES[2]["question"], max_tokens=24)
        reply = server.request("POST", CHAT, long)
        self.assertIn(reply[0], (400, 500))
        self.assertIn("memory", self.check_error(reply, reply[0])["message"])
        self.assertEqual(text_of(server.post(CHAT, ASK)), CASE["expected"])
        self.assertEqual(server.stop(), 0, server.log())
        self.assertIn("; 0 bytes of keys and values in use", server.log())


def same(found, expected, tolerance):
    """The evict ratio that is to be found: the one expected, but for so much."""
    ratio = found["evict_ratio"] if isinstance(found, dict) else None
    return ratio if ratio is not None and abs(ratio - expected["evict_ratio"]) < tolerance else expected["evict_ratio"]


class Tasks(Answers):
    """The same with prompts of kvzap make-tasks, as many as $KVZAP_SERVE_TASKS says, in f32 and bf16."""

    COUNT = int(os.environ.get("KVZAP_SERVE_TASKS", "12"))
    RUN = ["-m", MODEL, "--surrogate", MLP, "--threshold=-3.4", "--window", "32"]
    made, dtype = {}, "f32"

    def answers(self):
        if self.dtype in Tasks.made:
            return Tasks.made[self.dtype]
        tasks = self.folder / "tasks.jsonl"
        result = run_command([KVZAP, "make-tasks", "--kind", "recall", "--length", "400,900", "--per-task", "50", "--seed", "3",
                              "-m", MODEL, "-o", tasks, "-q"])
        self.assertEqual(result.code, 0, result)
        rows = [json.loads(line) for line in tasks.read_text().splitlines()]
        made = Tasks.made[self.dtype] = []
        for row in random.Random(1).sample(rows, min(self.COUNT, len(rows))):
            result = harness.kvzap(*self.RUN, "-p", row["context"], "--question", row["question"], "--dtype", self.dtype,
                                   "-n", "24", "--json", "-", "-q")
            self.assertEqual(result.code, 0, result)
            report = json.loads(result.out)
            answer = report["answers"][0]
            made.append((asking(row["context"], row["question"], max_tokens=24), {
                "text": answer["text"], "new_tokens": answer["new_tokens"],
                "prompt_tokens": report["context"]["tokens"] + answer["question_tokens"],
                "evict_ratio": answer["cache"]["evict_ratio"],
            }))
        return made

    def agree(self, ranks, dtype, others=0):
        self.dtype = dtype
        self.check(self.COUNT, ranks, dtype=dtype, others=others)

    def test_one_process(self):
        self.agree(0, "f32")

    def test_on_ranks(self):
        for ranks in 1, 2, 4:
            with self.subTest(ranks=ranks):
                self.agree(ranks, "f32")

    def test_bf16(self):
        """Where two tokens are nearly as likely, the order of sums can decide."""
        for ranks in 1, 2, 4:
            with self.subTest(ranks=ranks):
                self.agree(ranks, "bf16", others=max(1, self.COUNT // 20))

    test_small_steps = test_little_memory = test_too_little_memory = None


class Leaving(ServerTest):
    """Clients that go away, and those that find no room."""

    def setUp(self):
        super().setUp()
        self.server = self.start(*ENDLESS, *PRUNED, "--max-sequences", "4", "--max-queue", "2")
        self.expected = text_of(self.server.post(CHAT, ASK))

    def endless(self, **fields):
        return {**ASK, "max_tokens": 10**6, "ignore_eos": True, **fields}

    def send(self, body):
        """A connection on which a request has been sent, and no more."""
        connection = self.server.connect()
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        self.addCleanup(connection.close)
        return connection

    def tearDown(self):
        self.server.wait_until_idle()
        self.assertEqual(text_of(self.server.post(CHAT, ASK)), self.expected)
        self.stop(self.server)
        super().tearDown()

    def test_in_a_stream(self):
        for choices in (1, 3):
            before = self.server.metrics()["kvzap_requests_cancelled_total"]
            connection, response = self.server.open_stream(CHAT, self.endless(n=choices))
            for _ in zip(range(5), events_of(response)):
                pass
            self.server.wait_for("running", lambda s: s["running"] == choices)
            connection.close()
            self.server.wait_until_idle()
            self.assertEqual(self.server.metrics()["kvzap_requests_cancelled_total"], before + 1)

    def test_while_waiting_for_the_whole(self):
        for choices in (1, 3):
            connection = self.send(self.endless(n=choices))
            self.server.wait_for("running", lambda s: s["running"] == choices)
            connection.close()
            self.server.wait_until_idle()

    def test_with_a_reset(self):
        for stream in (True, False):
            connection = self.send(self.endless(stream=stream))
            self.server.wait_for("running", lambda s: s["running"] == 1)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            self.server.wait_until_idle()

    def test_with_a_reset_after_much_more(self):
        """More than the server reads while it answers."""
        connection = self.send(self.endless())
        self.server.wait_for("running", lambda s: s["running"] == 1)
        connection.sock.setblocking(False)
        try:
            while True:
                connection.sock.send(bytes(1 << 16))
        except BlockingIOError:
            pass
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        self.server.wait_until_idle()

    def test_without_reading(self):
        """A client that takes nothing holds up nobody else."""
        silent = socket.socket()
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        silent.connect(("127.0.0.1", self.server.port))
        body = json.dumps(self.endless(stream=True, logprobs=True, top_logprobs=20)).encode()
        silent.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                       % (CHAT.encode(), len(body), body))
        self.server.wait_for("running", lambda s: s["running"] == 1)
        for _ in range(3):
            self.assertEqual(text_of(self.server.post(CHAT, ASK)), self.expected)
        silent.close()

    def test_no_room(self):
        running = []
        for count in range(1, 5):
            running.append(self.send(self.endless(stream=True)))
            self.server.wait_for("one more that runs", lambda s: s["running"] == count)
        waiting = [self.send(self.endless()) for _ in range(2)]
        self.server.wait_for("two that wait", lambda s: s["waiting"] == 2)
        for body in (ASK, {**ASK, "stream": True}):
            reply = self.server.request("POST", CHAT, body)
            self.check_error(reply, 429)
            self.assertGreaterEqual(int(reply[1]["Retry-After"]), 1)
        self.assertEqual(self.server.metrics()["kvzap_requests_refused_total"], 2)
        # A waiting client leaves, so that another may wait.
        waiting.pop().close()
        self.server.wait_for("room", lambda s: s["waiting"] == 1)
        # Two prompts need more room: none of them waits.
        self.check_error(self.server.request("POST", PLAIN, {"prompt": ["one", "two"]}), 429)
        waiting.append(self.send(ASK))
        self.server.wait_for("two that wait", lambda s: s["waiting"] == 2)
        running[0].close()
        running[1].close()
        response = waiting[1].getresponse()
        self.assertEqual((response.status, text_of(json.loads(response.read()))), (200, self.expected))
        for connection in running + waiting:
            connection.close()


class FewDescriptors(ServerTest):
    """More clients than the process has descriptors for."""
    LIMIT, CLIENTS, SECONDS = 48, 120, 60

    def start_limited(self):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.LIMIT, hard))  # the server inherits it
        try:
            return self.start(*PRUNED, "--max-sequences", "8", "--max-queue", "200")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def client(self, server, number, ends):
        """Appends how the request ended; every third client leaves, every fourth one waits for the whole reply."""
        try:
            body = {**ASK, "max_tokens": 60, "ignore_eos": True}
            if number % 4 == 1 and number % 3 != 0:
                ends.append(("whole", server.request("POST", CHAT, body)[0] == 200))
                return
            connection, response = server.open_stream(CHAT, body)
            events = events_of(response)
            if number % 3 == 0:
                next(events)
                connection.close()
                response.close()
                ends.append(("left", True))
                return
            ends.append(("stream", list(events)[-1] == "[DONE]"))
            connection.close()
        except (OSError, http.client.HTTPException, AssertionError, IndexError, StopIteration) as error:
            ends.append((repr(error), False))

    def test_no_live_request_is_cut_off(self):
        server = self.start_limited()
        ends = []
        threads = [threading.Thread(target=self.client, args=(server, i, ends), daemon=True)
                   for i in range(self.CLIENTS)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + max(self.SECONDS, PATIENCE)
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))
        self.assertEqual(len(ends), self.CLIENTS)
        self.assertEqual([kind for kind, is_well in ends if not is_well], [], server.log())
        left = sum(kind == "left" for kind, _ in ends)
        self.stop(server)
        gone = [line for line in server.lines if "the client has disconnected" in line]
        self.assertLessEqual(len(gone), left, gone)


class Ending(ServerTest):
    """Signals."""

    def endless(self, server):
        """A stream that has begun, and does not end by itself."""
        connection, response = server.open_stream(CHAT, {**ASK, "max_tokens": 10**6, "ignore_eos": True})
        self.addCleanup(connection.close)
        events = events_of(response)
        for _ in zip(range(3), events):
            pass
        return connection, events

    def test_idle(self):
        for number in (signal.SIGTERM, signal.SIGINT):
            for ranks in (0, 2) if number == signal.SIGTERM else (0,):
                server = self.start(*PRUNED, ranks=ranks)
                self.assertEqual(text_of(server.post(CHAT, ASK)), CASE["expected"])
                self.assertEqual(server.stop(number), 0, server.log())
                self.check_end(server)
        server = self.start(*PRUNED)  # nobody has asked for anything
        self.stop(server)

    def test_idle_ranks_sleep(self):
        server = self.start(*PRUNED, ranks=2)
        self.assertEqual(text_of(server.post(CHAT, ASK)), CASE["expected"])

        def seconds():
            times = [pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
                     for pid in descendants(server.process.pid)]
            return sum(int(ticks) for pair in times for ticks in pair) / os.sysconf("SC_CLK_TCK")

        time.sleep(0.2)  # until the step after the answer is over
        before = seconds()
        time.sleep(2)
        self.assertLess(seconds() - before, 0.5)
        self.stop(server)

    def test_what_runs_is_finished(self):
        for ranks in (0, 2):
            server = self.start(*PRUNED, "--max-sequences", "1", "--drain-seconds", PATIENCE, ranks=ranks)
            ask = {**ASK, "max_tokens": 1500, "ignore_eos": True}
            connection, response = server.open_stream(CHAT, {**ask, "stream_options": {"include_usage": True}})
            events = events_of(response)
            first = [event for _, event in zip(range(3), events)]
            waits = server.connect()
            waits.request("POST", CHAT, json.dumps(ASK), {"Content-Type": "application/json"})
            # The server has read both. The first may have ended by then.
            states = [f"kvzap_requests_{state}" for state in ("running", "waiting", "finished_total")]
            server.wait_for("both requests", lambda _: sum(map(server.metrics().get, states)) == 2)
            server.send(signal.SIGTERM)
            rest = list(events)
            self.assertEqual(rest[-1], "[DONE]")
            self.assertEqual(rest[-2]["usage"]["completion_tokens"], 1500)
            self.assertTrue(streamed(first + rest[:-1])[0].startswith(CASE["expected"]))
            reply = waits.getresponse()
            self.assertEqual((reply.status, text_of(json.loads(reply.read()))), (200, CASE["expected"]))
            connection.close()
            waits.close()
            self.assertEqual(server.wait(), 0, server.log())
            self.check_end(server)

    def test_nobody_new(self):
        server = self.start(*ENDLESS, *PRUNED)
        connection, _ = self.endless(server)
        server.send(signal.SIGTERM)
        end = time.monotonic() + PATIENCE
        while server.request("GET", "/health")[0] != 503:
            self.assertLess(time.monotonic(), end)
        self.assertIn("Retry-After", server.request("GET", "/health")[1])
        for body in (ASK, {**ASK, "stream": True}):
            self.check_error(server.request("POST", CHAT, body), 503)
        self.assertEqual(server.status()["running"], 1)
        connection.close()
        self.assertEqual(server.wait(), 0, server.log())
        self.check_end(server)

    def cut(self, server, events):
        """A stream that the server ends, with an error or in the middle."""
        try:
            rest = list(events)
        except (OSError, http.client.HTTPException):
            rest = []
        self.assertFalse(any("choices" in event and event["choices"] and event["choices"][0]["finish_reason"]
                             for event in rest if event != "[DONE]"))
        self.assertEqual(server.wait(), 128 + signal.SIGTERM, server.log())
        self.check_end(server)

    def test_twice(self):
        server = self.start(*ENDLESS, *PRUNED)
        _, events = self.endless(server)
        server.send(signal.SIGTERM)
        end = time.monotonic() + PATIENCE
        while server.request("GET", "/health")[0] != 503:
            self.assertLess(time.monotonic(), end)
        time.sleep(0.5)  # what comes at once is no second wish
        server.send(signal.SIGINT)
        self.cut(server, events)

    def test_no_longer_than_said(self):
        server = self.start(*ENDLESS, *PRUNED, "--drain-seconds", "0.3")
        _, events = self.endless(server)
        server.send(signal.SIGTERM)
        self.cut(server, events)

    def test_whole_reply_that_is_cut_off_is_503(self):
        server = self.start(*ENDLESS, *PRUNED, "--drain-seconds", "0.3")
        waits = server.connect()
        self.addCleanup(waits.close)
        waits.request("POST", CHAT, json.dumps({**ASK, "max_tokens": 10**6, "ignore_eos": True}),
                      {"Content-Type": "application/json"})
        server.wait_for("running", lambda s: s["running"] == 1)
        server.send(signal.SIGTERM)
        response = waits.getresponse()
        self.check_error((response.status, response.headers, response.read()), 503)
        self.assertIn("Retry-After", response.headers)
        self.assertEqual(server.wait(), 128 + signal.SIGTERM, server.log())

    def test_while_weights_are_loaded(self):
        config = harness.SOURCE / "inputs/configs/Qwen3-0.6B"
        process = subprocess.Popen([KVZAP, "serve", "-m", config, "--random-weights", "1", "--port", "0", "--progress",
                                    "lines"], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        self.addCleanup(process.kill)
        self.assertIn(b"no tokenizer", process.stderr.readline())
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=PATIENCE)
        # It may just have been done.
        self.assertIn(process.returncode, (0, 128 + signal.SIGTERM), rest)


class Prefixes(ServerTest):
    """What begins as an earlier prompt did is not run again, and answered all the same."""

    QUESTIONS = [CASE["question"], *Answers.QUESTIONS[1:]]

    def ask(self, server, question, **fields):
        body = asking(CASE["context"], question, max_tokens=24, ignore_eos=True, **fields)
        reply = server.post(CHAT, body)
        return text_of(reply), reply["kvzap"], cached_tokens_of(reply), reply["usage"]["prompt_tokens"]

    def test_second_question(self):
        alone = []
        for question in self.QUESTIONS:
            server = self.start(*PRUNED)
            alone.append(self.ask(server, question))
            self.assertEqual(alone[-1][2], 0)
            self.stop(server)
        for ranks in (0, 2):
            server = self.start(*PRUNED, ranks=ranks)
            for place, i in enumerate((2, 0, 1, 0)):
                text, pruned, cached, prompt = self.ask(server, self.QUESTIONS[i])
                self.assertEqual((text, prompt), (alone[i][0], alone[i][3]))
                self.assertAlmostEqual(pruned["evict_ratio"], alone[i][1]["evict_ratio"], places=9)
                self.assertEqual(pruned["full_kv_bytes"], alone[i][1]["full_kv_bytes"])
                if place:
                    self.assertGreaterEqual(cached, CASE["n_context"] - 8)  # but for what the template adds
                    self.assertLess(cached, prompt)
            # Pruned otherwise, it is another prompt.
            self.assertEqual(self.ask(server, self.QUESTIONS[0], kvzap={"threshold": -4})[2], 0)
            self.assertEqual(self.ask(server, self.QUESTIONS[0], kvzap={"prune": "none"})[2], 0)
            self.assertGreater(self.ask(server, self.QUESTIONS[1], kvzap={"prune": "none"})[2], 0)
            self.assertGreater(server.metrics()["kvzap_cached_prompt_tokens_total"], 0)
            self.stop(server)

    def test_document_and_question_in_one_text(self):
        """The document is run once, although it is judged together with each question."""
        def ask(server, question, **fields):
            reply = server.post(CHAT, asking(CASE["context"] + question, max_tokens=24, ignore_eos=True, **fields))
            self.assertLess(cached_tokens_of(reply), reply["usage"]["prompt_tokens"])
            return text_of(reply), reply["kvzap"], cached_tokens_of(reply)

        for prune, ranks in (({}, 2), ({"prune": "none"}, 0)):
            alone = []
            for question in self.QUESTIONS[:2]:
                server = self.start(*PRUNED)
                alone.append(ask(server, question, kvzap=prune))
                self.assertEqual(alone[-1][2], 0)
                self.stop(server)
            server = self.start(*PRUNED, ranks=ranks)
            for place, i in enumerate((1, 0, 1)):
                text, pruned, cached = ask(server, self.QUESTIONS[i], kvzap=prune)
                self.assertEqual(text, alone[i][0])
                self.assertAlmostEqual(pruned["evict_ratio"], alone[i][1]["evict_ratio"], places=9)
                self.assertEqual(pruned["full_kv_bytes"], alone[i][1]["full_kv_bytes"])
                if place:
                    self.assertGreaterEqual(cached, CASE["n_context"] - 8)
            # Pruned otherwise, it is another prompt.
            self.assertEqual(ask(server, self.QUESTIONS[0], kvzap={"threshold": -4})[2], 0)
            self.stop(server)

    def test_same_prompt(self):
        server = self.start(*PRUNED)
        ids = server.post("/tokenize", {"content": CASE["context"]})["tokens"]
        ask = {"prompt": ids, "max_tokens": 8, "temperature": 0}
        first, second = server.post(PLAIN, ask), server.post(PLAIN, ask)
        self.assertEqual(text_of(first), text_of(second))
        self.assertEqual(first["kvzap"], second["kvzap"])
        self.assertEqual(cached_tokens_of(first), 0)
        self.stop(server)

    def test_conversation(self):
        server, other = self.start(*PRUNED), self.start(*PRUNED)
        turns = [*ASK["messages"]]
        for question in self.QUESTIONS[1:]:
            reply = server.post(CHAT, {**ASK, "messages": turns})
            turns = [*turns, {"role": "assistant", "content": text_of(reply)}, {"role": "user", "content": question}]
        reply = server.post(CHAT, {**ASK, "messages": turns})
        self.assertGreater(cached_tokens_of(reply), CASE["n_context"] - 8)
        fresh = other.post(CHAT, {**ASK, "messages": turns})
        self.assertEqual(cached_tokens_of(fresh), 0)
        self.assertEqual(text_of(reply), text_of(fresh))
        self.assertAlmostEqual(reply["kvzap"]["evict_ratio"], fresh["kvzap"]["evict_ratio"], places=9)
        self.stop(server)
        self.stop(other)

    def test_system_message(self):
        server = self.start(*PRUNED)
        system = {"role": "system", "content": CASE["context"]}
        seen = []
        for context in (CASES[1]["context"], "The code of the red box is 5."):
            for _ in range(2):
                reply = server.post(CHAT, {**ASK, "messages": [system, {"role": "user", "content": context}]})
                seen.append((text_of(reply), cached_tokens_of(reply)))
        self.assertEqual(seen[0][0], seen[1][0])
        self.assertEqual(seen[2][0], seen[3][0])
        self.assertEqual(seen[0][1], 0)
        self.assertGreater(seen[2][1], 0)
        self.stop(server)


class Lookup(ServerTest):
    def test_answers_and_counts(self):
        for flags in (PRUNED, [*PRUNED, "--prune", "always"]):
            plain, server = self.start(*flags), self.start(*flags, "--lookup", "6", ranks=2)
            for question in (CASE["context"], *Prefixes.QUESTIONS):
                ask = asking(CASE["context"] + question, max_tokens=40, ignore_eos=True, temperature=0)
                expected, reply = plain.post(CHAT, ask), server.post(CHAT, ask)
                self.assertEqual(text_of(reply), text_of(expected))
                self.assertAlmostEqual(reply["kvzap"]["evict_ratio"], expected["kvzap"]["evict_ratio"], places=9)
                self.assertNotIn("completion_tokens_details", expected["usage"])
            details = reply["usage"]["completion_tokens_details"]
            metrics = server.metrics()
            self.assertGreaterEqual(metrics["kvzap_accepted_tokens_total"], details["accepted_prediction_tokens"])
            self.assertGreater(metrics["kvzap_drafted_tokens_total"], metrics["kvzap_accepted_tokens_total"])
            self.assertEqual(plain.metrics()["kvzap_drafted_tokens_total"], 0)
            self.stop(plain)
            self.stop(server)


class Windows(ServerTest):
    def test_auto(self):
        """The server takes the window of its surrogate; ratios of requests are looked up for this window."""
        folder = self.folder / "surrogate"
        shutil.copytree(MLP, folder)
        rows = {32: -4.0, 8: -3.0}
        table = {"format": "kvzap.thresholds", "format_version": 2, "model": "m", "dtype": "f32", "chat_template": True,
                 "texts": 1, "tokens": 300, "sink": 0,
                 "windows": [{"window": window, "rows": [{"evict_ratio": ratio, "threshold": threshold + ratio, "mean": 0.5,
                                                          "deviation": 0, "least": 0, "most": 1} for ratio in (0.5, 0.75)]}
                             for window, threshold in rows.items()]}
        (folder / "thresholds.json").write_text(json.dumps(table))
        ask = asking(CASE["context"], max_tokens=4, temperature=0)
        flags = ["--surrogate", folder, "--dtype", "f32"]
        auto = self.start(*flags, "--evict-ratio", "0.75", "--window", "auto")  # a quarter of 75 rows
        self.assertTrue(any("--window auto: 8 tokens" in line for line in auto.lines), auto.lines)
        named = self.start(*flags, "--threshold=-2.25", "--window", "8")
        self.assertEqual(auto.post(CHAT, ask)["kvzap"]["evict_ratio"], named.post(CHAT, ask)["kvzap"]["evict_ratio"])
        self.assertEqual(auto.post(CHAT, {**ask, "kvzap": {"evict_ratio": 0.5}})["kvzap"]["evict_ratio"],
                         named.post(CHAT, {**ask, "kvzap": {"threshold": -2.5}})["kvzap"]["evict_ratio"])
        self.stop(auto)
        self.stop(named)


class Policies(ServerTest):
    """Policies that requests name, and amounts of their own."""

    def expected(self, *flags):
        result = harness.kvzap("-m", MODEL, "-p", CASE["context"], "--question", CASE["question"], "--dtype", "f32",
                               "-n", 24, *flags, "--json", "-", "-q")
        self.assertEqual(result.code, 0, result)
        (answer,) = json.loads(result.out)["answers"]
        return answer["text"], round(answer["cache"]["evict_ratio"], 9)

    def ask(self, server, **wish):
        reply = server.post(CHAT, {**ASK, "kvzap": wish})
        return (text_of(reply), round(reply["kvzap"]["evict_ratio"], 9)), cached_tokens_of(reply)

    def test_of_a_request(self):
        snapkv = self.expected("--policy", "snapkv", "--evict-ratio", 0.5)
        keydiff = self.expected("--policy", "keydiff+ada", "--keep-tokens", 100)
        kvzip = self.expected("--policy", "kvzip", "--evict-ratio", 0.5)
        pruned = self.expected(*PRUNED[:-2])
        for flags, ranks in ((PRUNED, 2), (["--dtype", "f32", "--window", "32"], 0)):
            server = self.start(*flags, ranks=ranks)
            for is_second in (False, True):
                for wish, expected in (({"policy": "snapkv", "evict_ratio": 0.5}, snapkv),
                                       ({"policy": "keydiff+ada", "keep_tokens": 100}, keydiff),
                                       ({"policy": "kvzip", "evict_ratio": 0.5}, kvzip)):
                    answer, cached = self.ask(server, **wish)
                    self.assertEqual((answer, cached > 0), (expected, is_second), wish)
            full, cached = self.ask(server, policy="none")
            self.assertEqual((full[1], cached), (0, 0))
            self.assertGreater(self.ask(server, prune="none")[1], 0)
            if ranks:
                self.assertEqual(self.ask(server), (pruned, 0))
                self.assertEqual(self.ask(server, policy="kvzap", threshold=-3.4)[0], pruned)
                self.assertGreater(self.ask(server, policy="kvzap", threshold=-3.4)[1], 0)
                rows, cached = self.ask(server, policy="kvzap", keep_tokens=30)
                self.assertEqual(cached, 0)
                self.assertGreater(rows[1], 0.8)
            else:
                with self.assertRaises(AssertionError):
                    self.ask(server, policy="kvzap", threshold=-3.4)
            self.stop(server)

    def test_long_answers(self):
        """Cuts while the answer is generated: of the server, of a request, and on two ranks."""
        cuts = {"decode_every": 16, "decode_keep": 48}
        own = ["--policy", "h2o", "--keep-tokens", 48, "--decode-every", 16, "--decode-keep", 48]
        for flags, ranks in ((["--dtype", "f32"], 0), (["--dtype", "f32", *own], 2)):
            server = self.start(*flags, ranks=ranks)
            for policy in ("h2o", "tova", "r-kv", None):
                if policy is None and not ranks:
                    continue
                wish = {"policy": policy, "keep_tokens": 48, **cuts} if policy else {}
                for count in (100, 400):
                    reply = server.post(CHAT, {**ASK, "max_tokens": count, "ignore_eos": True, "kvzap": wish})
                    usage = reply["usage"]
                    self.assertEqual(usage["completion_tokens"], count)
                    tokens = usage["prompt_tokens"] + count - 1
                    rows = (1 - reply["kvzap"]["evict_ratio"]) * tokens
                    self.assertTrue(47.5 <= rows < 48 + 16, (policy, count, rows))
            self.stop(server)

    def test_errors(self):
        server = self.start("--dtype", "f32")
        for wish, param, words in (
            ({"policy": "snapkv", "keep_tokens": 9, "decode_every": 4}, "kvzap.decode_keep", "kvzap.decode_every needs"),
            ({"policy": "kvzip", "keep_tokens": 9, "decode_every": 4, "decode_keep": 9}, "kvzap.decode_every",
             "cannot score again"),
            ({"policy": "snapvk", "evict_ratio": 0.5}, "kvzap.policy",
             "'snapvk'; expected one that this server can run for a request: none, knorm, random, "),
            ({"policy": "kvzap", "threshold": -3}, "kvzap.policy", "expected one that"),
            ({"policy": "snapkv"}, "kvzap.evict_ratio", "how much is evicted"),
            ({"policy": "expected-attention:statistics=/etc/passwd", "evict_ratio": 0.5}, "kvzap.policy", "is a file"),
            ({"policy": "knorm", "kv_budget": "1kB"}, "kvzap.kv_budget", "below the minimum"),
            ({"evict_ratio": 0.5}, "kvzap", "expected kvzap.policy"),
        ):
            error = self.check_error(server.request("POST", CHAT, {**ASK, "kvzap": wish}), 400, param)
            self.assertIn(words, error["message"])
        turns = [*ASK["messages"], {"role": "assistant", "content": "It is 5."}, {"role": "user", "content": "Really?"}]
        for policy, reason in (
            ("kvzip", "the model run the context again"),
            ("h2o+critical", "from its earlier scores, which critical replaces"),
            ("h2o+rerotate", "by their age, which the new positions of rerotate do not tell"),
        ):
            wish = {"policy": policy, "evict_ratio": 0.5}
            reply = server.request("POST", CHAT, {"messages": turns, "kvzap": wish})
            message = self.check_error(reply, 400, "kvzap.policy")["message"]
            self.assertIn("takes one context, but the prompt has 2: it ", message)
            self.assertIn(reason, message)
        self.stop(server)
        server = self.start("--dtype", "f32", "--request-policies", "off")
        reply = server.request("POST", CHAT, {**ASK, "kvzap": {"policy": "snapkv", "evict_ratio": 0.5}})
        self.assertIn("no policy from requests", self.check_error(reply, 400, "kvzap.policy")["message"])
        self.stop(server)
        budget = run_command([KVZAP, "serve", "-m", MODEL, "--port", "0", "--policy", "knorm", "--kv-budget", "1kB"])
        self.fail_with(budget, "the budget of 1000 bytes is below the minimum")


class KvTypes(ServerTest):
    """Types of keys and values that requests name."""

    def ask(self, server, **wish):
        reply = server.post(CHAT, {**ASK, "kvzap": wish})
        return (text_of(reply), reply["kvzap"]), cached_tokens_of(reply)

    def test_of_a_request(self):
        expected = {}
        for kv_type in ("q8", "f32", "q8,q4"):
            server = self.start(*PRUNED, "--kv-type", kv_type)
            expected[kv_type], _ = self.ask(server)
            self.stop(server)
        held = {kv_type: answer[1]["kv_bytes"] for kv_type, answer in expected.items()}
        self.assertGreater(held["f32"], 1.5 * held["q8"])
        self.assertGreater(held["q8"], held["q8,q4"])
        for own, ranks in (("f32", 2), ("q8", 0)):
            server = self.start(*PRUNED, "--kv-type", own, "--kv-memory", "8MB", ranks=ranks)
            for round_number in range(2):
                for kv_type, answer in expected.items():
                    found, cached = self.ask(server, kv_type=kv_type)
                    self.assertEqual(found, answer, (own, kv_type))
                    self.assertEqual(cached > 0, round_number > 0, (own, kv_type))
            error = self.check_error(server.request("POST", CHAT, {**ASK, "kvzap": {"kv_type": "q5"}}), 400,
                                     "kvzap.kv_type")
            self.assertIn("expected f32 (as dtype), q8, q4", error["message"])
            self.stop(server)
        server = self.start(*PRUNED, "--request-policies", "off")
        reply = server.request("POST", CHAT, {**ASK, "kvzap": {"kv_type": "q8"}})
        self.assertIn("this server takes f32 alone", self.check_error(reply, 400, "kvzap.kv_type")["message"])
        self.stop(server)


class ReadPages(ServerTest):
    def test_answers_are_those_of_a_run(self):
        """Also when the prompt's beginning is reused."""
        flags = ["--dtype", "f32", "--page-rows", "8", "--window", "16", "--read-pages", "0.3"]
        text = CASE["context"] + " " + CASE["question"]
        run = run_command([KVZAP, "run", "-m", MODEL, "-p", text, "-n", "16", "-q", "--json", "-", *flags])
        expected = json.loads(run.out)["answers"][0]["text"]
        for ranks in (0, 2):
            server = self.start(*flags, ranks=ranks)
            for _ in range(2):
                reply = server.post(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 16, "temperature": 0})
                self.assertEqual(text_of(reply), expected)
            self.stop(server)


if __name__ == "__main__":
    unittest.main()
