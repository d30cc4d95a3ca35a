"""kvzap serve's vectors of texts: against transformers, on several ranks, beside answers, and what is compared."""
import array
import base64
import json
import math
import pathlib
import struct
import threading
import unittest

from harness import MODEL, SOURCE
from test_serve import ASK, CHAT, PRUNED, ServerTest, SharedServerTest

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
GOLDEN = SOURCE / "tests/golden"


def read_safetensors(path):
    """Lists of numbers by name, with their shapes: ids (I32) and floats (F32)."""
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        values = array.array({"I32": "i", "F32": "f"}[entry["dtype"]], data[8 + length + begin:8 + length + end])
        tensors[name] = (list(values), entry["shape"])
    return tensors


def unit(vector):
    norm = math.sqrt(sum(x * x for x in vector))
    return [x / norm for x in vector]


def cosine(a, b):
    return sum(x * y for x, y in zip(unit(a), unit(b)))


class EmbeddingTest(ServerTest):
    def vectors(self, server, body):
        return [one["embedding"] for one in server.post(EMBEDDINGS, body)["data"]]

    def check_near(self, found, expected, bound=1e-3):
        self.assertEqual(len(found), len(expected))
        self.assertLess(max(abs(a - b) for a, b in zip(found, expected)), bound * max(map(abs, expected)))


class Goldens(EmbeddingTest):
    """Vectors are those of transformers' AutoModel."""

    def test_models(self):
        for name, flags, ranks in (("qwen2-random", [], 0), ("qwen2-random", ["--pooling", "mean"], 2),
                                   ("llama-random", ["--max-batch-tokens", "16", "--pooling", "mean"], 0),
                                   ("llama-random", ["--max-batch-tokens", "16"], 2)):
            with self.subTest(name=name, flags=flags, ranks=ranks):
                tensors = read_safetensors(GOLDEN / f"embeddings/{name}.safetensors")
                server = self.start("--dtype", "f32", *flags, model=GOLDEN / "models" / name, ranks=ranks)
                texts = ("short", "some", "long")
                found = self.vectors(server, {"input": [tensors[f"{text}.ids"][0] for text in texts]})
                for text, vector in zip(texts, found):
                    values, (tokens, size) = tensors[f"{text}.hidden"]
                    rows = [values[t * size:(t + 1) * size] for t in range(tokens)]
                    expected = [sum(column) for column in zip(*rows)] if "mean" in flags else rows[-1]
                    self.check_near(vector, unit(expected))
                self.stop(server)


class Embeddings(EmbeddingTest, SharedServerTest):
    FLAGS = PRUNED

    def test_forms_of_requests(self):
        texts = ["The lamp is lit.", "A light is on.", "Seven"]
        ids = [self.server.post("/tokenize", {"content": text, "add_special": True})["tokens"] for text in texts]
        reply = self.server.post(EMBEDDINGS, {"input": texts, "model": "recall-4m", "user": "u", "dimensions": None})
        self.assertEqual((reply["object"], reply["model"]), ("list", "recall-4m"))
        self.assertEqual([one["index"] for one in reply["data"]], [0, 1, 2])
        count = sum(map(len, ids))
        self.assertEqual(reply["usage"], {"prompt_tokens": count, "total_tokens": count})
        vectors = [one["embedding"] for one in reply["data"]]
        for text, of_ids, vector in zip(texts, ids, vectors):
            self.assertAlmostEqual(sum(x * x for x in vector), 1, delta=1e-5)
            self.check_near(self.vectors(self.server, {"input": text})[0], vector)
            self.check_near(self.vectors(self.server, {"input": of_ids})[0], vector)
        packed = self.vectors(self.server, {"input": texts, "encoding_format": "base64"})
        for text, vector in zip(packed, vectors):
            self.check_near(list(struct.unpack(f"<{len(vector)}f", base64.b64decode(text))), vector)
        self.assertEqual(len(self.vectors(self.server, {"input": "x", "dimensions": len(vectors[0])})[0]), len(vectors[0]))

    def test_beside_answers(self):
        long = ["word " * count for count in (5, 300, 1200)]
        alone = self.vectors(self.server, {"input": long})
        expected = self.server.post(CHAT, ASK)["choices"][0]["message"]
        answers = []
        chats = [threading.Thread(target=lambda: answers.append(self.server.post(CHAT, ASK))) for _ in range(3)]
        for chat in chats:
            chat.start()
        for found, vector in zip(self.vectors(self.server, {"input": long}), alone):
            self.check_near(found, vector)
        for chat in chats:
            chat.join()
        self.assertEqual([answer["choices"][0]["message"] for answer in answers], [expected] * 3)

    def test_leaves_no_state(self):
        before = self.server.get("/kvzap/status")["prefixes"]
        self.vectors(self.server, {"input": "An input that nobody has sent before. " * 40})
        after = self.server.get("/kvzap/status")
        self.assertEqual((after["prefixes"], after["running"], after["waiting"]), (before, 0, 0))

    def test_scores(self):
        query, documents = "The lamp", ["The lamp is lit.", "Seven", "The lamp"]
        vectors = self.vectors(self.server, {"input": [query, *documents]})
        expected = [cosine(vectors[0], vector) for vector in vectors[1:]]
        reply = self.server.post(SCORE, {"text_1": query, "text_2": documents})
        self.assertEqual([one["index"] for one in reply["data"]], [0, 1, 2])
        for one, score in zip(reply["data"], expected):
            self.assertAlmostEqual(one["score"], score, delta=1e-3)
        pairs = self.server.post(SCORE, {"text_1": documents, "text_2": documents})
        self.assertTrue(all(abs(one["score"] - 1) < 1e-3 for one in pairs["data"]))
        ranked = self.server.post(RERANK, {"query": query, "documents": documents, "top_n": 2})["results"]
        self.assertEqual(ranked[0]["index"], 2)
        self.assertEqual(ranked[0]["document"], {"text": "The lamp"})
        self.assertEqual(len(ranked), 2)
        self.assertGreaterEqual(ranked[0]["relevance_score"], ranked[1]["relevance_score"])
        plain = self.server.post(RERANK, {"query": query, "documents": documents, "return_documents": False})["results"]
        self.assertEqual((len(plain), "document" in plain[0]), (3, False))

    def test_errors(self):
        for path, body, field, message in (
                (EMBEDDINGS, {}, "input", "the input is missing"),
                (EMBEDDINGS, {"input": []}, "input", "input is []; expected"),
                (EMBEDDINGS, {"input": ["a", 5]}, "input[1]", "input[1] is 5"),
                (EMBEDDINGS, {"input": "a", "dimensions": 7}, "dimensions", "dimensions is not supported"),
                (EMBEDDINGS, {"input": "a " * 50000}, "input", "input has "),
                (SCORE, {"text_1": ["a", "b"], "text_2": "c"}, "text_1", "text_1 has 2 texts; expected 1"),
                (RERANK, {"query": "a"}, "documents", "documents is missing")):
            status, _, reply = self.server.request("POST", path, body)
            error = json.loads(reply)["error"]
            self.assertEqual((status, error["param"]), (400, field), error)
            self.assertTrue(error["message"].startswith(message), error)
        status, _, reply = self.server.request("POST", EMBEDDINGS, {"input": "a", "model": "other"})
        self.assertEqual((status, json.loads(reply)["error"]["code"]), (404, "model_not_found"))
        status, _, reply = self.server.request("POST", "/embedding", {})
        self.assertIn("expected /v1/embeddings", json.loads(reply)["error"]["message"])

    def test_more_inputs_than_places(self):
        server = self.start("--max-sequences", "2", "--max-queue", "40")
        vectors = self.vectors(server, {"input": [f"number {i}" for i in range(40)]})
        self.assertEqual(len({json.dumps(vector) for vector in vectors}), 40)
        status, _, reply = server.request("POST", EMBEDDINGS, {"input": ["a"] * 41})
        self.assertEqual(status, 400)
        self.assertIn("expected at most 40", json.loads(reply)["error"]["message"])
        self.stop(server)


if __name__ == "__main__":
    unittest.main()
