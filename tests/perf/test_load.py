"""perf/load.py against a small server of its own: what it sends, what it measures, what it does with errors."""
import http.server
import json
import pathlib
import random
import sys
import tempfile
import threading
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "perf"))

import load  # noqa: E402
import shapes  # noqa: E402
import soak  # noqa: E402


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reply(self, status, text, kind="application/json", **headers):
        data = text if isinstance(text, bytes) else text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        answers = {
            "/v1/models": json.dumps({"data": [{"id": "m"}]}),
            "/metrics": f'# HELP a\nkvzap_preemptions_total{{model_name="m"}} {len(self.server.bodies)}\n',
            "/kvzap/status": json.dumps({"running": 2, "waiting": 1, "kv_allocated": 5, "prefixes": None}),
        }
        self.reply(200 if self.path in answers else 404, answers.get(self.path, "{}"))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            number = len(self.server.bodies)
        what = self.server.outcomes(number)
        if what == 429:
            return self.reply(429, "{}", Retry_After="0")
        chat = "messages" in body
        chunks = [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}] if chat else []
        for i in range(body["max_tokens"]):
            piece = {"delta": {"content": "a"}} if chat else {"text": "a"}
            chunks.append({"choices": [{"index": 0, **piece}]})
        pruned = {"evict_ratio": 0.5, "kv_bytes": 10, "full_kv_bytes": 20}
        chunks.append({"choices": [{"index": 0, "finish_reason": "length", "kvzap": pruned}]})
        if what != "no usage":
            usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
            chunks.append({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 3}}})
        if what == "error":
            chunks = [*chunks[:2], {"error": {"message": "no"}}]
        events = [json.dumps(chunk) for chunk in chunks] + ([] if what == "cut" else ["[DONE]"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in events:
            data = f"data: {event}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            time.sleep(0.001)
        self.wfile.write(b"0\r\n\r\n")


class Load(unittest.TestCase):
    def setUp(self):
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.bodies, self.server.lock = [], threading.Lock()
        self.server.outcomes = lambda number: 200
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        self.target = load.Target(f"http://127.0.0.1:{self.server.server_address[1]}/v1")

    def measure(self, prompts, **options):
        options = {"requests": 12, "seconds": 600, **options}
        return load.measure(self.target, lambda i: (prompts.path, prompts.body(i)), **options)

    def test_closed_loop(self):
        for chat in (False, True):
            self.server.bodies.clear()
            point = self.measure(load.Prompts(new_tokens=5, prompt_tokens=8, chat=chat), clients=3)
            self.assertEqual(len(self.server.bodies), 12)
            self.assertEqual((point["clients"], point["requests"], point["outcomes"]), (3, 12, {"200": 12}))
            self.assertEqual((point["new_tokens"], point["prompt_tokens"], point["cached_tokens"]), (5, 7, 3))
            self.assertEqual((point["evict_ratio"], point["kv_bytes"], point["full_kv_bytes"]), (0.5, 10, 20))
            self.assertEqual((point["first_token"]["n"], point["between_tokens"]["n"]), (12, 48))
            self.assertGreater(point["first_token"]["p50"], 0)
            self.assertAlmostEqual(point["tokens_per_second"], 60 / point["seconds"])
            self.assertAlmostEqual(point["requests_per_second"], 12 / point["seconds"])
            self.assertEqual((point["most"]["running"], point["most"]["kv_allocated"], point["preempted"]), (2, 5, 12))
        self.assertEqual(self.target.model(), "m")

    def test_open_loop(self):
        point = self.measure(load.Prompts(new_tokens=2), rate=500)
        self.assertEqual((point["rate"], point["requests"], point["outcomes"]), (500, 12, {"200": 12}))
        few = self.measure(load.Prompts(new_tokens=2), rate=20, requests=10**6, seconds=0.5)
        self.assertLess(few["requests"], 100)

    def test_errors(self):
        kinds = [429, "error", "cut", "no usage"]
        self.server.outcomes = lambda number: kinds[number % 4]
        point = self.measure(load.Prompts(new_tokens=5), clients=2)
        self.assertEqual(point["outcomes"], {"200": 3, "429": 3, "cut off": 3, "error in a stream": 3})
        self.assertAlmostEqual(point["tokens_per_second"], 15 / point["seconds"])  # of answers without usage, too
        gone = load.Target("http://127.0.0.1:1")
        reply = load.ask(gone, "/v1/completions", {})
        self.assertEqual(reply.outcome, "ConnectionRefusedError")
        self.assertEqual(load.figures([reply])["tokens_per_second"], 0)


class Prompts(unittest.TestCase):
    def test_lengths(self):
        for count in (1, 2, 3, 10, 1000, 1001, 1002):
            self.assertEqual(len(load.words(random.Random(count), count)), count)
        prompts = load.Prompts(prompt_tokens=5, document_tokens=7, vocabulary=10)
        body = prompts.body(3)
        self.assertEqual(len(body["prompt"]), 12)
        self.assertTrue(all(0 <= token < 10 for token in body["prompt"]))
        self.assertEqual(body, load.Prompts(prompt_tokens=5, document_tokens=7, vocabulary=10).body(3))
        self.assertEqual(body["prompt"][:7], prompts.body(4)["prompt"][:7])
        self.assertNotEqual(body["prompt"][7:], prompts.body(4)["prompt"][7:])
        self.assertNotEqual(body["prompt"][:7], prompts.body(3, document=1)["prompt"][:7])
        parts = load.Prompts(prompt_tokens=5, document_tokens=7, chat=True).body(0)["messages"][0]["content"]
        self.assertEqual([len(part["text"]) for part in parts], [7, 5])

    def test_texts(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "texts.jsonl"
            file.write_text('"a"\n\n{"prompt": "b"}\n{"context": "c", "question": "d"}\n{"text": "e"}\n')
            texts = load.read_texts(file)
            self.assertEqual(texts, ["a", "b", "cd", "e"])
            self.assertEqual([load.Prompts(texts=texts).body(i)["prompt"] for i in (0, 5)], ["a", "b"])
            for text in ("", '{"other": 1}\n', "5\n"):
                file.write_text(text)
                self.assertRaises(SystemExit, load.read_texts, file)

    def test_quantiles(self):
        values = list(range(1, 101))
        self.assertEqual([load.quantile(values, q) for q in (0, 0.01, 0.5, 0.99, 1)], [1, 1, 50, 99, 100])
        self.assertEqual((load.quantile([5], 0.99), load.quantile([], 0.5)), (5, None))

    def test_vocabulary(self):
        tokens, special = shapes.vocabulary({"vocab_size": 400, "eos_token_id": [390]})
        self.assertEqual((len(tokens), len(set(tokens))), (400, 400))
        self.assertEqual([tokens[i] for i in (ord("a"), 388, 389, 390)], ["a", *special])


class Soak(unittest.TestCase):
    def test_requests(self):
        """They are JSON, and functions of seed, client and number."""
        made = [[json.dumps(traffic.request(kind)) for kind in soak.KINDS for _ in range(20)]
                for traffic in (soak.Traffic(None, seed, 0, 32, 500) for seed in (1, 1, 2))]
        self.assertEqual(made[0], made[1])
        self.assertNotEqual(made[0], made[2])

    def test_pause(self):
        """No client sends a request until all have seen the pause and its end."""
        pause, sent, ends = soak.Pause(4), [], threading.Event()

        def client():
            while not ends.is_set():
                pause.pass_by()
                sent.append(1)
                time.sleep(0.001)

        threads = [threading.Thread(target=client) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(3):
            pause.begin()
            count = len(sent)
            time.sleep(0.05)
            self.assertEqual(len(sent), count)
            pause.end()
            while len(sent) == count:
                time.sleep(0.001)
        ends.set()
        for thread in threads:
            thread.join()

    def test_growth(self):
        rows = [{"minute": minute, "resident": 100 + minute, "descriptors": 5, "threads": 6} for minute in (1, 4.8, 6, 30)]
        self.assertEqual({name: round(value, 1) for name, value in soak.growth(rows).items()}, {"resident": 25.2, "descriptors": 0, "threads": 0})


if __name__ == "__main__":
    unittest.main()
