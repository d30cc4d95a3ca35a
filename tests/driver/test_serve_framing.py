"""kvzap serve and the bytes of HTTP/1.1: where a request ends, as RFC 9110 and 9112 say. A server and a proxy in front
that disagree about it give one client the answer to another."""
import json
import re
import socket
import unittest

import test_serve as serve
from harness import PATIENCE

GET = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
BODY = b'{"content": "The code is 5."}'
POST = b"POST /tokenize HTTP/1.1\r\nHost: 127.0.0.1\r\n"
HEALTH = {"status": "ok"}


class Client:
    """A connection, and the replies that come on it."""

    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
        self.input = b""

    def more(self):
        """Returns False if the server has closed the connection."""
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        self.input += data
        return bool(data)

    def head(self):
        """Status and fields of the next reply; None if the connection ends before."""
        while b"\r\n\r\n" not in self.input:
            if not self.more():
                assert not self.input, self.input
                return None
        head, _, self.input = self.input.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        fields = {name.lower(): value.strip() for name, value in (line.split(":", 1) for line in lines)}
        return int(re.fullmatch(r"HTTP/1\.1 (\d{3}) .*", first).group(1)), fields

    def reply(self, has_body=True):
        """Status, fields and body of the next reply; None if the connection ends before."""
        found = self.head()
        if found is None:
            return None
        status, fields = found
        length = int(fields["content-length"]) if has_body else 0
        while len(self.input) < length:
            assert self.more(), self.input
        body, self.input = self.input[:length], self.input[length:]
        return status, fields, body

    def rest(self):
        while self.more():
            pass
        return self.input

    def stays_open(self):
        """Whether a further request is answered."""
        try:
            self.socket.sendall(GET + b"\r\n")
        except OSError:
            return False
        found = self.reply()
        return found is not None and json.loads(found[2]) == HEALTH


class Framing(serve.SharedServerTest):
    def client(self):
        client = Client(self.server.port)
        self.addCleanup(client.socket.close)
        return client

    def send(self, data):
        client = self.client()
        client.socket.sendall(data)
        return client

    def test_what_breaks_the_protocol(self):
        """Each gets an error, and nothing after it is taken for a request."""
        hidden = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
        chunked = b"Transfer-Encoding: chunked\r\n"
        rows = [(400, POST + b"Content-Length: %s\r\n\r\n" % length + BODY)
                for length in (b"29abc", b"+29", b"29,5", b"29, 29", b"abc", b"0x1d", b"-1", b"", b"2 9", b"29;", b"1e1",
                               b"99999999999999999999999", b"29\r\nContent-Length: 5", b"29\r\nContent-Length: 29")]
        rows += [
            (400, POST + b"Content-Length : 29\r\n\r\n" + BODY),
            (400, POST + b"Content-Length: 29\r\n" + chunked + b"\r\n" + chunks),
            (400, POST + chunked + b"Content-Length: 29\r\n\r\n" + chunks),
            (400, POST + chunked + chunked + b"\r\n" + chunks),
            (400, POST.replace(b"1.1", b"1.0") + chunked + b"\r\n" + chunks),
            (501, POST + b"Transfer-Encoding: gzip\r\n\r\n" + chunks),
            (501, POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunks),
            (501, POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n" + chunks),
            (501, POST + b"Transfer-Encoding: identity\r\n\r\n" + chunks),
            (501, POST + b"Transfer-Encoding: xchunked\r\n\r\n" + chunks),
            (501, POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks),
            (400, POST + b"Transfer-Encoding : chunked\r\n\r\n" + chunks),
            (400, b"GET /health HTTP/1.1\r\n\r\n"),
            (400, GET + b"Host: 127.0.0.1\r\n\r\n"),
            (400, b"GET /health HTTP/1.1\r\nHost: a b\r\n\r\n"),
            (400, b"GET /health HTTP/1.1\r\n Host: 127.0.0.1\r\n\r\n"),
            (400, b"GET /health HTTP/1.1\nHost: 127.0.0.1\n\n"),
            (400, b"GET /health\r\n\r\n"),
            (400, b"GET  /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
            (505, b"GET /health HTTP/2.0\r\nHost: 127.0.0.1\r\n\r\n"),
            (505, b"GET /health HTTP/1.2\r\nHost: 127.0.0.1\r\n\r\n"),
            (400, GET + b"X: a\r\n b\r\n\r\n"), (400, GET + b"X:\r\n\ta\r\n\r\n"),
            (400, POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + chunks),
            (400, POST + b"Content-Length:\r\n 29\r\n\r\n" + BODY),
            *((400, GET + b"%s: %s\r\nX: y\r\n%s: %s\r\n\r\n" % (name, value, name.lower(), value))
              for name, value in ((b"Origin", b"http://127.0.0.1"), (b"Authorization", b"Bearer x"),
                                  (b"Content-Type", b"application/json"), (b"Content-Encoding", b"identity"),
                                  (b"Expect", b"100-continue"))),
            (400, GET + b": x\r\n\r\n"), (400, GET + b"X\r\n\r\n"), (400, GET + b"X y: z\r\n\r\n"),
            (400, GET + b"X: a\0b\r\n\r\n"), (400, GET + b"X: a\rb\r\n\r\n"),
            (417, POST + b"Expect: a miracle\r\nContent-Length: 29\r\n\r\n" + BODY),
            (431, GET + b"X: " + (70 << 10) * b"a" + b"\r\n\r\n"),
        ]
        rows += [(400, POST + chunked + b"\r\n" + size + b"\r\n" + BODY + b"\r\n0\r\n\r\n")
                 for size in (b"0x1d", b"+1d", b"-1", b"1d ;", b"", b"zz", b"fffffffffffffffff", b"1d\n", b"1c", b"1e",
                              b"1d;\0")]
        for status, data in rows:
            with self.subTest(data[:200]):
                client = self.send(data + hidden)
                found = client.reply()
                self.assertEqual(found[0], status, found)
                self.assertEqual(found[1]["connection"], "close")
                self.assertEqual(set(json.loads(found[2])["error"]), serve.ERROR_FIELDS)
                self.assertEqual(client.rest(), b"")

    def test_body_of_a_request_that_has_none(self):
        """It may arrive after the reply: then it is no request."""
        for method in (b"GET", b"HEAD"):
            for length in (b"Content-Length: 44", b"Transfer-Encoding: chunked"):
                client = self.send(GET.replace(b"GET", method) + length + b"\r\n\r\n")
                status, fields, _ = client.reply(method == b"GET")
                self.assertEqual((status, fields["connection"]), (200, "close"))
                try:
                    client.socket.sendall(GET + b"\r\n")
                except OSError:
                    pass
                self.assertEqual(client.rest(), b"")

    def test_bodies_that_are_not_read(self):
        for data in (POST.replace(b"tokenize", b"none"), POST.replace(b"POST", b"PUT"),
                     POST + b"Content-Encoding: gzip\r\n", POST + b"Content-Type: multipart/form-data; boundary=x\r\n"):
            client = self.send(data + b"Content-Length: 5\r\n\r\n")
            status, fields, _ = client.reply()
            self.assertIn(status, (404, 405, 415))
            self.assertEqual(fields["connection"], "close")
            self.assertEqual(client.rest(), b"")

    def test_what_is_allowed(self):
        """Each is answered, and so is the next request on the connection."""
        content = b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        rows = [
            GET + b"\r\n", b"\r\n" + GET + b"\r\n", b"\r\n\r\n" + GET + b"Content-Length: 0\r\n\r\n",
            GET + b"X: a\r\nY:\r\nZ:\t\xff \r\nX: b\r\n\r\n",
            b"GET http://127.0.0.1/health HTTP/1.1\r\nHost: other\r\n\r\n",
            b"GET /%68ealth?a=%zz HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n",
            b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
            POST + content, POST + b"Expect: 100-continue\r\n" + content, POST + b"Content-Encoding: identity\r\n" + content,
            POST + b"Transfer-Encoding: Chunked\r\n\r\n8;a=b\r\n" + BODY[:8] + b"\r\n15\r\n" + BODY[8:] +
            b"\r\n00\r\nX: y\r\n\r\n",
        ]
        for data in rows:
            with self.subTest(data[:200]):
                client = self.send(data)
                status, fields, body = client.reply()
                self.assertEqual(status, 200, body)
                self.assertIn(b"tokens" if data.startswith(b"POST") else b"ok", body)
                self.assertEqual((fields["connection"], fields["keep-alive"]), ("keep-alive", "timeout=30"))
                self.assertRegex(fields["date"], r"^\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT$")
                self.assertTrue(client.stays_open())

    def test_byte_by_byte(self):
        client = self.client()
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data = b"\r\n" + POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (
            BODY[:5], len(BODY) - 5, BODY[5:])
        for byte in data:
            client.socket.sendall(bytes([byte]))
        self.assertEqual(client.reply()[0], 200)
        self.assertTrue(client.stays_open())

    def test_one_request_each(self):
        for data in (b"GET /health HTTP/1.0\r\n\r\n", GET + b"Connection: close\r\n\r\n"):
            client = self.send(data)
            status, fields, body = client.reply()
            self.assertEqual((status, fields["connection"], json.loads(body)), (200, "close", HEALTH))
            self.assertEqual(client.rest(), b"")

    def test_head(self):
        for path in (b"/health", b"/", b"/v1/models", b"/none"):
            client = self.send(b"HEAD %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % path)
            status, fields = client.head()
            self.assertEqual(status, 404 if path == b"/none" else 200)
            self.assertGreater(int(fields["content-length"]), 5)
            self.assertTrue(client.stays_open())

    def test_expectation(self):
        client = self.send(POST + b"Expect: 100-Continue\r\nContent-Length: %d\r\n\r\n" % len(BODY))
        self.assertEqual(client.head(), (100, {}))
        client.socket.sendall(BODY)
        self.assertEqual(client.reply()[0], 200)
        self.assertTrue(client.stays_open())
        for head in (POST + b"Content-Length: 99999999\r\n", POST.replace(b"tokenize", b"none") + b"Content-Length: 5\r\n"):
            client = self.send(head + b"Expect: 100-continue\r\n\r\n")
            self.assertIn(client.reply()[0], (404, 413))
            self.assertEqual(client.rest(), b"")

    def http(self, path, body, more=b"", version=b"1.1"):
        text = json.dumps(body).encode()
        return b"POST %s HTTP/%s\r\nHost: 127.0.0.1\r\n%sContent-Length: %d\r\n\r\n%s" % (
            path.encode(), version, more, len(text), text)

    def test_pipeline(self):
        """Requests that are sent at once are answered in their order."""
        client = self.send(self.http(serve.CHAT, serve.ASK) + GET + b"\r\n" +
                           self.http("/tokenize", {"content": "a"}) + GET + b"\r\n" + self.http("/none", {}) + GET + b"\r\n")
        self.assertEqual(serve.text_of(json.loads(client.reply()[2])), serve.CASE["expected"])
        self.assertEqual(json.loads(client.reply()[2]), HEALTH)
        self.assertEqual(list(json.loads(client.reply()[2])), ["tokens"])
        self.assertEqual(json.loads(client.reply()[2]), HEALTH)
        self.assertEqual(client.reply()[0], 404)
        self.assertEqual(client.rest(), b"")

    def test_half_closed(self):
        """A client that has sent all gets its answers, as with nc -N."""
        text = serve.CASE["expected"].encode()
        for data, wanted in ((GET + b"\r\n", 1), (GET + b"\r\n" + GET + b"\r\n", 2),
                             (self.http(serve.CHAT, serve.ASK), 1),
                             (self.http(serve.CHAT, serve.ASK, version=b"1.0"), 1),
                             (self.http(serve.CHAT, {**serve.ASK, "max_tokens": 300, "ignore_eos": True}), 1)):
            client = self.send(data)
            client.socket.shutdown(socket.SHUT_WR)
            for _ in range(wanted):
                found = client.head()
                while found[0] == 100:  # a sign of life before a late answer
                    found = client.head()
                self.assertEqual(found[0], 200)
                length = int(found[1]["content-length"])
                while len(client.input) < length:
                    self.assertTrue(client.more())
                body, client.input = client.input[:length], client.input[length:]
                self.assertIn(text if b"POST" in data else b"ok", body)
            self.assertEqual(client.rest(), b"")
        for version in (b"1.1", b"1.0"):
            client = self.send(self.http(serve.CHAT, {**serve.ASK, "stream": True}, version=version))
            client.socket.shutdown(socket.SHUT_WR)
            status, fields = client.head()
            self.assertEqual((status, "transfer-encoding" in fields), (200, version == b"1.1"))
            self.assertTrue(client.rest().rstrip().endswith(b"data: [DONE]" if version == b"1.0" else b"\r\n0"))
        client = self.send(POST + b"Content-Length: 99\r\n\r\n" + BODY)
        client.socket.shutdown(socket.SHUT_WR)
        self.assertEqual(client.reply()[0], 400)


if __name__ == "__main__":
    unittest.main()
