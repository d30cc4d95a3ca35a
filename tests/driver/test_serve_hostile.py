"""kvzap serve under requests that no client should send: any bytes as HTTP and JSON, any values of fields, forms of answers that are much work.
$KVZAP_HOSTILE_REQUESTS says how many, $KVZAP_SEED which."""
import json
import os
import pathlib
import random
import re
import shutil
import socket
import struct
import tempfile
import threading
import time
import unittest

import hostile_forms
from harness import CASES, PATIENCE
from test_serve import CHAT, ERROR_FIELDS, PLAIN, PRUNED, ServerTest, asking, seed, text_of
from test_serve_protocols import MESSAGES, RESPONSES, model_with_tools

CASE = CASES[0]
ASK = asking(CASE["context"], CASE["question"], max_tokens=24)
COUNT = "/v1/messages/count_tokens"


def no_constant(name):
    raise ValueError(f"{name} in JSON")


def json_of(data):
    """JSON as RFC 8259 has it: UTF-8, and neither NaN nor Infinity."""
    return json.loads(data.decode(), parse_constant=no_constant)


def whole_body(head, body):
    """A body without the frames of chunks."""
    if not re.search(rb"(?i)\r\ntransfer-encoding: *chunked", head):
        return body
    data = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        if length == 0:
            return data
        data, body = data + body[:length], body[length + 2:]


class Hostile(ServerTest):
    """Always an answer within LONGEST seconds, as JSON and with a status that the guide lists; the server lives, its memory is bounded, and requests
    beside get the right answer."""

    LONGEST = 120  # with sanitizers, on a busy machine
    LARGEST = 4 << 30  # bytes of the process at its largest: forms of answers may take 1 GiB
    # With any of them a reply may come.
    STATUSES = {200, 400, 403, 404, 405, 408, 413, 415, 417, 429, 431, 501, 503, 505}
    TRASH = [None, True, False, 0, -1, 1, 1.5, 1e308, -1e308, 10**400, 2**63, -(2**63) - 1, 2**64, "", "x", "\0",
             "\ud800", "\U0001f600", "x" * 5000, [], {}, [[]], [None], {"": None}, [{}] * 50, "<|im_end|>", "NaN",
             "\uffff\ufffe", ["a"] * 5000, {"type": "text"},
             [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]]
    FIELDS = ["model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k",
              "min_p", "seed", "stop", "n", "logprobs", "top_logprobs", "stream", "stream_options", "ignore_eos",
              "kvzap", "echo",
              "presence_penalty", "frequency_penalty", "repetition_penalty", "response_format", "tools", "best_of",
              "suffix", "logit_bias", "stop_token_ids", "min_tokens", "tool_choice", "chat_template_kwargs", "content",
              "tokens", "add_special", "unknown", "", "\0"]
    KINDS = ["valid", "types", "bytes", "nested", "numbers", "text", "half", "slow", "leave", "reset", "headers",
             "http", "chunks", "pipeline", "lengths", "forms", "forms", "tools", "rules", "responses", "messages", "identity"]
    # Names of requests that are sent on.
    IDENTITIES = [b"", b"a", b"trace-17", b"a" * 128, b"a" * 129, b"a" * 60000, b"\xff\xfe", b"\xc3\xa9", b"a b", b"\t", b"a\x7f", b"\x1b[2J", b'"', b"{}", b"%0d%0a",
                  b"<script>", b"../..", b"a\r\nX-Request-Id: b", b"-_.:+/=", b"\\", b"'; --", b"\x80"]

    def setUp(self):
        super().setUp()
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        self.server = self.start(*PRUNED, "-q", "--max-sequences", "8", model=model_with_tools(folder))
        self.responses, self.longest, self.lock = [], {}, threading.Lock()

    def body(self, draw):
        """A request that is quickly answered, and its path."""
        if draw.random() < 0.5:
            body = asking("The code of the red box is 5.", " What is it?", max_tokens=draw.randrange(1, 6))
            path = CHAT
        else:
            body = {"prompt": "The code of the red box is 5.", "max_tokens": draw.randrange(1, 6)}
            path = PLAIN
        for field, value in (("stream", True), ("n", 2), ("logprobs", True if path == CHAT else 1), ("stop", ["5"]),
                             ("temperature", 1.0), ("kvzap", {"prune": "always"})):
            if draw.random() < 0.2:
                body[field] = value
        return path, body

    def trash(self, draw, depth=0):
        if depth < 3 and draw.random() < 0.2:
            return {draw.choice(self.FIELDS): self.trash(draw, depth + 1) for _ in range(draw.randrange(4))}
        if depth < 3 and draw.random() < 0.2:
            return [self.trash(draw, depth + 1) for _ in range(draw.randrange(4))]
        return draw.choice(self.TRASH)

    def rules(self, draw):
        """Fields that change which tokens come, and what a reply tells of them."""
        tokens = [str(i) for i in range(1024)]
        makers = {
            "logit_bias": lambda: draw.choice([
                {}, {"5": 100}, {"5": -100}, dict.fromkeys(tokens, -100), dict.fromkeys(tokens, 100), {"1023": 100}, {"-1": 1}, {"1024": 1}, {"a": 1},
                {"5": "x"}, {"5": 1e400}, {"00005": 1}, {"1e2": 1}, {"5.0": 1}, {"": 1}, {str(2**70): 1}, [], 5]),
            "stop_token_ids": lambda: draw.choice([[], [5], list(range(1024)), 2000 * [5], [-1], [2**40], ["a"], [1.5], 5, {}]),
            "min_tokens": lambda: draw.choice([0, 3, 10**9, 2**63 - 1, 2**63, -1, 1.5, "1"]),
            "n": lambda: draw.choice([1, 2, 16, 17, 0, -1, 2**40]),
            "best_of": lambda: draw.choice([1, 2, 100]),
            "logprobs": lambda: draw.choice([True, False, 0, 1, 20, 21, -1, None]),
            "top_logprobs": lambda: draw.choice([0, 1, 20, 21, -1]),
            "echo": lambda: draw.choice([True, True, False, 1]),
            "ignore_eos": lambda: draw.choice([True, False]),
            "max_tokens": lambda: draw.choice([0, 1, 5, 30]),
            "seed": lambda: draw.choice([-1, 0, 2**63, 2**64, -(2**63)]),
            "temperature": lambda: draw.choice([0, 1, 100, 1e-300, 100.1]),
            "stop": lambda: draw.choice(["5", ["T", "h"], [""], 17 * ["a"], "a" * 1025, "\ud800"]),
            "prompt": lambda: draw.choice([[5], [1023, 1021], [[5, 6], [7]], 128 * ["a"], 129 * ["a"], [], [[]], [5, "a"], [-1], [1024], "", "\ufeff"]),
            "return_progress": lambda: True, "stream_options": lambda: {"include_usage": True},
            "kvzap": lambda: draw.choice([{"return_kept": True}, {"policy": "snapkv", "evict_ratio": 0.5}, {"kv_type": "q4"}, {"prune": "always"}, {"keep_tokens": 1}]),
        }  # fmt: skip
        return {name: makers[name]() for name in draw.sample(list(makers), draw.randrange(1, 6))}

    def ask(self, kind, draw):
        """A request for the server's answers, as they are restricted in unusual ways: its path and body."""
        tokens = draw.choice([1, 2, 5, 5, 30])
        path, body = draw.choice([
            (CHAT, {"messages": [{"role": "user", "content": "The number is 5."}], "max_tokens": tokens}),
            (PLAIN, {"prompt": "The number is 5.", "max_tokens": tokens}),
            (RESPONSES, {"input": "The number is 5.", "max_output_tokens": tokens}),
            (MESSAGES, {"messages": [{"role": "user", "content": "The number is 5."}], "max_tokens": tokens})])
        if kind == "tools":
            shape = {CHAT: "chat", PLAIN: "chat", RESPONSES: "responses", MESSAGES: "messages"}[path]
            body.update(hostile_forms.tools(draw, shape))
            if draw.random() < 0.2:
                body.update(hostile_forms.form(draw))
        elif kind == "forms":
            form = hostile_forms.form(draw)
            format = form.pop("response_format", None)
            body.update(form)
            if path == RESPONSES and format:
                inner = format.get("json_schema") if isinstance(format, dict) else None
                body["text"] = {"format": {"type": "json_schema", **inner} if isinstance(inner, dict) else format}
            elif path == MESSAGES and format:
                body["output_config"] = {"format": draw.choice([format, {"type": "json_schema", "schema": hostile_forms.schema(draw)}])}
            elif format is not None:
                body["response_format"] = format
        elif kind == "rules":
            body.update(self.rules(draw))
            path = draw.choice([path, PLAIN])
            body.setdefault("prompt", "The number is 5.")
        elif kind == "responses":
            path, body = RESPONSES, {"input": self.items(draw), "max_output_tokens": tokens}
            with_id = draw.choice([*self.responses[-20:], "resp_x", "", 5, "\0", "resp_" + "a" * 5000])
            body.update({name: value for name, value in {
                "previous_response_id": with_id, "store": draw.choice([True, False, 5]), "instructions": draw.choice(["Be brief.", "", 5, "\0"]),
                "metadata": draw.choice([{"a": "b"}, {}, 5, {"": ["x" * 5000]}]), "reasoning": draw.choice([{"effort": "none"}, {"effort": "high"}, {"effort": 5}, {}]),
                "include": draw.choice([[], ["message.output_text.logprobs"], ["x"], 5]), "truncation": draw.choice(["auto", "disabled"]),
                "background": draw.random() < 0.5, "text": draw.choice([{}, {"format": {"type": "text"}}, {"format": {"type": "json_object"}}, 5])}.items()
                if draw.random() < 0.3})
        elif kind == "messages":
            path, body = draw.choice([MESSAGES, MESSAGES, COUNT]), {"messages": self.turns(draw), "max_tokens": tokens}
            body.update({name: value for name, value in {
                "system": draw.choice(["", "Be brief.", [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], 5, [5]]),
                "stop_sequences": draw.choice([["5"], [], [""], 5]), "thinking": draw.choice([{"type": "enabled", "budget_tokens": 5}, {"type": "disabled"}, {"type": "x"}, 5]),
                "metadata": {"user_id": "\0"}, "top_k": draw.choice([5, -5]), "mcp_servers": draw.choice([[], [5]])}.items() if draw.random() < 0.3})
        if draw.random() < 0.3:
            body["stream"] = True
        if draw.random() < 0.3:
            body["ignore_eos"] = True
        if draw.random() < 0.5:
            body["temperature"] = draw.choice([0, 1.0, 2.0])
        if draw.random() < 0.1:
            body[draw.choice([*self.FIELDS, *body])] = self.trash(draw)
            body["max_completion_tokens"] = 2
            if path in (RESPONSES, MESSAGES):
                body["max_output_tokens" if path == RESPONSES else "max_tokens"] = 2
        return path, body

    def items(self, draw):
        """Input of /v1/responses."""
        choices = [{"role": "user", "content": "a"}, {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
                   {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}, {"type": "reasoning", "summary": []},
                   {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm"}]}, {"type": "function_call", "name": "now", "arguments": "{}", "call_id": "c"},
                   {"type": "function_call", "name": "now", "arguments": "[" * 3000, "call_id": "c"}, {"type": "function_call_output", "call_id": "c", "output": "5"},
                   {"type": "input_image"}, {"type": "message", "role": "x", "content": 5}, {}, 5, {"role": "system", "content": ""}, {"role": "user", "content": "refuse"}]
        return draw.choice(["The number is 5.", "", None, 5, *5 * [[draw.choice(choices) for _ in range(draw.randrange(5))] + [choices[0]]], 5000 * [choices[0]]])

    def turns(self, draw):
        """Messages of Anthropic's protocol."""
        blocks = [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "Hm", "signature": ""}, {"type": "tool_use", "id": "c", "name": "now", "input": {}},
                  {"type": "tool_use", "id": "c", "name": "now", "input": 5}, {"type": "tool_result", "tool_use_id": "c", "content": "5"},
                  {"type": "tool_result", "tool_use_id": "c"}, {"type": "image"}, {}, 5]
        turns = [{"role": draw.choice(["user", "user", "assistant", "system", 5]), "content": draw.choice(
            ["a", "", 5, None, [draw.choice(blocks) for _ in range(draw.randrange(4))]])} for _ in range(draw.randrange(4))]
        return draw.choice([turns + [{"role": "user", "content": "a"}]] * 5 + [turns, [], 5, None, 5000 * [{"role": "user", "content": "a"}]])

    def http(self, path, body, more=b"", method=b"POST", version=b"HTTP/1.1"):
        head = b"%s %s %s\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n" % (method, path.encode(), version)
        return head + more + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def make(self, kind, draw):
        """What is sent, in pieces; whether a reply has to come; how the connection is closed."""
        if kind in ("forms", "tools", "rules", "responses", "messages"):
            path, body = self.ask(kind, draw)
            return [self.http(path, json.dumps(body).encode())], True
        path, body = self.body(draw)
        text = json.dumps(body).encode()
        if kind == "identity":
            return [self.http(path, text, b"X-Request-Id: %s\r\n" % draw.choice([*self.IDENTITIES, draw.randbytes(20).translate(None, b"\r\n")]))], True
        if kind == "types":
            target = body
            if path == CHAT and draw.random() < 0.4:
                target = draw.choice([body["messages"][0], draw.choice(body["messages"][0]["content"])])
            for _ in range(draw.randrange(1, 4)):
                target[draw.choice([*self.FIELDS, *target, "role", "content", "type", "text"])] = self.trash(draw)
            # No endless answer: a whole number of max_tokens becomes 2.
            body["max_tokens"] = body.get("max_tokens") if not isinstance(body.get("max_tokens"), int) else 2
            if not body["max_tokens"] or "max_completion_tokens" in body:
                body["max_completion_tokens"] = 2
            path = draw.choice([path, path, path, RESPONSES, MESSAGES, COUNT, "/tokenize", "/detokenize"])
            return [self.http(path, json.dumps(body).encode())], True
        if kind == "bytes":
            text = bytearray(text)
            for _ in range(draw.randrange(1, 8)):
                at = draw.randrange(len(text))
                change = draw.randrange(4)
                if change == 0:
                    text[at] = draw.randrange(256)
                elif change == 1:
                    del text[at:]
                    text += b" "
                elif change == 2:
                    text[at:at] = draw.choice([b"\0", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"{", b"]", b'"',
                                               b"\\u0000"])
                else:
                    del text[at]
                    text += b" "
            if re.search(rb'"max_tokens": *\d{2,}', text) or b'"max_tokens"' not in text:
                text = text[: len(text) // 2]  # an answer as long as the context is none of this
            return [self.http(path, bytes(text))], True
        if kind == "nested":
            depth = draw.choice([10, 100, 1000, 10000, 200000])
            begin, end = draw.choice([(b"[", b"]"), (b'{"a":', b"}"), (b'{"kvzap":', b"}"), (b'[{"":', b"}]")])
            inner = begin * depth + b"1" + end * draw.choice([depth, depth, 0, depth - 1])
            where = draw.choice([b"%s", b'{"messages":%s}', b'{"prompt":%s}', b'{"prompt":"a","max_tokens":1,"x":%s}'])
            return [self.http(path, where % inner)], True
        if kind == "numbers":
            number = draw.choice([b"1e999", b"-1e999", b"9" * 5000, b"-" + b"9" * 400, b"0." + b"0" * 5000 + b"1",
                                  b"1e-999999", b"NaN", b"Infinity", b"0x10", b"01", b"-", b"1e",
                                  b"18446744073709551616", b"1E+400"])
            field = draw.choice(["temperature", "top_p", "top_k", "seed", "n", "top_logprobs", "max_tokens",
                                 "min_p"]).encode()
            return [self.http(path, text[:-1] + b', "%s": %s, "max_completion_tokens": 1}' % (field, number))], True
        if kind == "text":
            odd = draw.choice([b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"a\0b", b"\\u0000",
                               b"\\ud800", b"\\udc00\\ud800", "\u202e\u200b\ufeff".encode(), b"<|im_start|>system",
                               b"\\", b"\n", b" " * 20000,
                               "\u0301".encode() * 3000, b"\x7f\x1b[2J", b"a" * 100000])
            path = draw.choice([PLAIN, "/tokenize"])
            return [self.http(path, b'{"prompt": "%s", "content": "%s", "max_tokens": 1}' % (odd, odd))], True
        if kind == "half":
            whole = self.http(path, text)
            return [whole[: draw.randrange(len(whole))]], False
        if kind == "slow":
            whole = self.http(path, text)
            at = sorted(draw.sample(range(len(whole)), 6))
            return [whole[a:b] for a, b in zip([0, *at], [*at, len(whole)])], True
        if kind in ("leave", "reset"):
            return [self.http(path, text)], False
        if kind == "headers":
            more = draw.choice([b"X: %s\r\n" % (b"a" * draw.choice([100, 8000, 9000, 100000, 1000000])),
                                b"X: y\r\n" * draw.choice([10, 90, 110, 20000]), b"X\r\n", b": y\r\n", b"X : y\r\n",
                                b" X: y\r\n", b"X: \0\r\n", b"X: \xff\r\n", b"Host: a\r\nHost: b\r\n",
                                b"Expect: 100-continue\r\n", b"Expect: nonsense\r\n", b"Range: bytes=0-0,1-1,2-2\r\n",
                                b"Range: bytes=9-1\r\n", b"Content-Encoding: gzip\r\n",
                                b"Accept-Encoding: br;q=x,gzip\r\n", b"Origin: http://evil\r\n",
                                b"Connection: upgrade\r\nUpgrade: websocket\r\n", b"Connection: close\r\n",
                                b"Content-Type: multipart/form-data; boundary=x\r\n", b"Authorization: Bearer x\r\n"])
            return [self.http(path, text, more)], None
        if kind == "http":
            whole = draw.choice([
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(500),
                draw.randbytes(draw.randrange(1, 3000)), b"\r\n" * 1000, b"GET /\r\n\r\n", b"GET / HTTP/3.0\r\n\r\n",
                b"GET " + b"/a" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
                b"GET /%00%ff%zz?%=&&=#%23 HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"NONSENSE / HTTP/1.1\r\nHost: x\r\n\r\n", b"GET http://other/health HTTP/1.1\r\nHost: x\r\n\r\n",
                b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /health HTTP/1.0\r\n\r\n",
                b"GET /health HTTP/1.1\n\n", b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
                b"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n", self.http(path, text, method=b"GET"),
                self.http(path, text, method=b"PUT"), self.http("/none", text),
                self.http(path, text, version=b"HTTP/1.0"), self.http(path + "/../..", text),
                self.http("//" + path, text)])
            return [whole], None
        if kind == "chunks":
            head = b"POST %s HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: %s\r\n\r\n" % (
                path.encode(), draw.choice([b"chunked", b"chunked", b"gzip, chunked", b"Chunked", b"identity",
                                            b"chunked, chunked"]))
            size = draw.choice([b"%x" % len(text), b"%X;a=b" % len(text), b"-1", b"ffffffffffffffff",
                                b"fffffffffffffffff", b"", b"zz", b"0x%x" % len(text), b"%x" % (len(text) + 1),
                                b"7fffffffffffffff"])
            end = draw.choice([b"\r\n0\r\n\r\n", b"\r\n0\r\nX: y\r\n\r\n", b"\n0\n\n", b"", b"0\r\n\r\n"])
            return [head + size + b"\r\n" + text + end], None
        if kind == "pipeline":
            return [self.http(path, text) * draw.randrange(2, 5) + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"], None
        if kind == "lengths":
            length = draw.choice([b"-1", b"+5", b"0", b"99999999999999999999999", b"1e3", b"5, 5", b"", b"x",
                                  b"1099511627776", b"%d" % (len(text) + 10), b"%d\r\nContent-Length: 3" % len(text),
                                  b"%d\r\nTransfer-Encoding: chunked" % len(text)])
            head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %s\r\n\r\n" % (path.encode(), length)
            return [head + text], None
        return [self.http(path, text)], True

    def read(self, connection, is_whole, seconds):
        """The head and body of a reply, as far as they come."""
        connection.settimeout(seconds)
        data = b""
        try:
            while True:
                head, found, body = data.partition(b"\r\n\r\n")
                if found and is_whole:
                    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                    if length and len(body) >= int(length.group(1)) or not length and body.endswith(b"0\r\n\r\n"):
                        break
                piece = connection.recv(1 << 16)
                if not piece:
                    break
                data += piece
        except (OSError, TimeoutError):
            pass
        return data

    def one(self, number):
        """Sends the request of this number. Returns what is wrong, or None."""
        draw = random.Random(f"{seed()} {number}")
        kind = self.KINDS[number % len(self.KINDS)]
        pieces, has_reply = self.make(kind, draw)
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE)
        begin = time.monotonic()
        try:
            try:
                for piece in pieces:
                    connection.sendall(piece)
                    if len(pieces) > 1:
                        time.sleep(0.01)
            except OSError:
                pass  # the server need not read what it refuses
            if kind in ("leave", "reset") and draw.random() < 0.7:
                connection.settimeout(0.05)
                for _ in range(draw.randrange(1, 20)):
                    if not connection.recv(draw.randrange(1, 200)):
                        break
            if kind == "half" and draw.random() < 0.3:
                connection.shutdown(socket.SHUT_WR)
                self.read(connection, False, 0.1)
            if has_reply is False:
                if kind == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return None
            # Where more than what has been sent is waited for, there is no reply for a while.
            data = self.read(connection, has_reply, PATIENCE if has_reply else 0.1)
        except OSError:
            data = b""
        finally:
            connection.close()
        with self.lock:
            self.longest[kind] = max(self.longest.get(kind, (0, 0)), (time.monotonic() - begin, number))
        if not data:
            return f"{number}, {kind}: no reply to {pieces[0][:300]!r}" if has_reply else None
        try:
            self.check(data, has_reply, pieces[0])
        except (AssertionError, ValueError, KeyError, TypeError) as problem:
            return f"{number}, {kind}: {problem!r}: {data[:300]!r} to {pieces[0][:300]!r}"
        return None

    def check(self, data, is_whole, request):
        """Raises an exception for a reply that is none."""
        while data.startswith(b"HTTP/1.1 100 "):
            data = data.partition(b"\r\n\r\n")[2]
        status = re.match(rb"HTTP/1\.[01] (\d+)", data)
        assert status and int(status.group(1)) in self.STATUSES or not data and not is_whole, "status"
        if not is_whole:
            return
        head, _, body = data.partition(b"\r\n\r\n")
        named = re.search(rb"(?i)\r\nx-request-id: ([^\r]*)", head)
        # Heads that are no HTTP have no name.
        assert re.fullmatch(rb"[\w.:+/=-]{1,128}", named.group(1)) if named else b"invalid HTTP request" in body, "X-Request-Id"
        body = whole_body(head, body)
        if int(status.group(1)) >= 400:
            reply = json_of(body)
            is_messages = request.startswith(b"POST /v1/messages")
            assert set(reply["error"]) == ({"type", "message"} if is_messages else ERROR_FIELDS), "error"
            return
        if b"text/event-stream" in head:
            assert body.endswith(b"\n\n"), "the end of a stream"
            for line in body.splitlines():
                if line.startswith(b"data: ") and line != b"data: [DONE]":
                    error = json_of(line[6:]).get("error")
                    assert not error or re.search("grammar", error["message"]), "an error in a stream"
            return
        reply = json_of(body)
        if reply.get("object") == "response" and reply.get("store"):
            self.responses.append(reply["id"])
        is_json = re.search(rb'"response_format": \{"type": "json_|"(guided_json|json_schema)":', request)
        for choice in reply.get("choices", []):
            if is_json and choice["finish_reason"] == "stop" and b'"stop' not in request:
                json_of((choice["message"]["content"] if "message" in choice else choice["text"]).encode())

    def one_beside(self, expected):
        """What is wrong with an answer beside others, or None."""
        begin = time.monotonic()
        reply = self.server.post(CHAT, ASK)
        with self.lock:
            self.longest["beside"] = max(self.longest.get("beside", (0, 0)), (time.monotonic() - begin, 0))
        found = text_of(reply), reply["kvzap"]
        return None if found == expected else f"beside: {found} instead of {expected}"

    def test_requests(self):
        count = int(os.environ.get("KVZAP_HOSTILE_REQUESTS", "450"))
        first = self.server.post(CHAT, ASK)
        expected = text_of(first), first["kvzap"]
        numbers, wrong = iter(range(count)), []
        has_ended = threading.Event()

        def attempt(name, work, *arguments):
            try:
                error = work(*arguments)
            except Exception as problem:
                error = f"{name}: {problem!r}"
            if error:
                wrong.append(error)

        def client():
            while True:
                with self.lock:
                    number = next(numbers, None)
                if number is None or len(wrong) > 20:
                    return
                attempt(number, self.one, number)

        def beside():
            while not has_ended.wait(0.2) and len(wrong) <= 20:
                attempt("beside", self.one_beside, expected)

        threads = [threading.Thread(target=client) for _ in range(8)]
        other = threading.Thread(target=beside)
        for thread in [*threads, other]:
            thread.start()
        for thread in threads:
            thread.join()
        has_ended.set()
        other.join()
        self.assertIsNone(self.server.process.poll(), f"seed {seed()}: the server has died\n{self.server.log()}")
        self.assertEqual(wrong, [], f"seed {seed()}")
        self.server.wait_until_idle()
        self.assertEqual(self.server.get("/health"), {"status": "ok"})
        self.assertIsNone(self.one_beside(expected))
        status = pathlib.Path(f"/proc/{self.server.process.pid}/status").read_text()
        largest = 1024 * int(re.search(r"VmHWM:\s*(\d+)", status).group(1))
        if "KVZAP_HOSTILE_REQUESTS" in os.environ:
            times = ", ".join(f"{kind} {longest:.2f} ({number})" for kind, (longest, number) in sorted(self.longest.items()))
            print(f"{count} requests, seed {seed()}: {largest / 1e6:.0f} MB at most; longest answers [s] (number): {times}")
        self.assertLess(max(self.longest.values())[0], self.LONGEST, self.longest)
        self.assertLess(largest, self.LARGEST)
        self.assertEqual(self.server.stop(), 0, self.server.log())
        self.assertNotIn("kvzap: error", self.server.log())

    def test_many_connections(self):
        """That say nothing, or little: others are served."""
        silent = [socket.create_connection(("127.0.0.1", self.server.port)) for _ in range(60)]
        for i, connection in enumerate(silent):
            connection.sendall(self.http(CHAT, json.dumps(ASK).encode())[: i * 5])
        self.assertEqual(text_of(self.server.post(CHAT, ASK)), CASE["expected"])
        for connection in silent:
            connection.close()
        self.server.wait_until_idle()
        self.assertEqual(self.server.stop(), 0, self.server.log())


if __name__ == "__main__":
    unittest.main()
