"""kvzap serve and clients that want more than their part: connections, memory, time, keys, other servers' names."""
import http.client
import json
import os
import pathlib
import re
import resource
import select
import signal
import socket
import subprocess
import threading
import time
import unittest

import test_serve as serve
from harness import KVZAP, MODEL, PATIENCE, run_command


PLACES = 4 + 4 + 1024  # for connections, of a server with --max-sequences 4 --max-queue 4


def allow_descriptors():
    """For more connections than PLACES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * PLACES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise unittest.SkipTest(f"needs {wanted} descriptors")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def peak_bytes(pid):
    for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmHWM")


class Limits(serve.ServerTest):
    def test_idle_connections(self):
        """More silent clients than places: the longest silent one makes room for a new one, the others stay."""
        allow_descriptors()
        server = self.start(*serve.PRUNED, "--max-sequences", "4", "--max-queue", "4")
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(PLACES)]
        for connection in silent:
            self.addCleanup(connection.close)
        silent[3].sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        self.assertEqual(server.get("/health"), {"status": "ok"})
        self.assertEqual(serve.text_of(server.post(serve.CHAT, serve.ASK)), serve.CASE["expected"])
        closed = []
        for number, connection in enumerate(silent):
            connection.setblocking(False)
            try:
                closed += [number] if connection.recv(1) == b"" else []
            except BlockingIOError:
                pass
        # All are closed after 30 seconds.
        self.assertLess(len(closed), 10, "the request has waited for the clients to give up")
        self.assertEqual(closed, list(range(len(closed))))
        self.stop(server)

    def test_no_thread_for_an_idle_connection(self):
        server = self.start(*serve.PRUNED)
        tasks = pathlib.Path(f"/proc/{server.process.pid}/task")
        server.post(serve.CHAT, serve.ASK)
        before = len(list(tasks.iterdir()))
        connections = [server.connect() for _ in range(200)]
        for connection in connections:
            self.addCleanup(connection.close)
            connection.request("GET", "/health")
            self.assertEqual(connection.getresponse().read(), b'{"status":"ok"}')
        self.assertEqual(len(list(tasks.iterdir())), before)
        self.stop(server)

    def test_long_prompts(self):
        """What cannot fit the context is refused before the tokenizer works on it."""
        server = self.start(*serve.PRUNED)
        pid = server.process.pid
        server.post(serve.CHAT, serve.ASK)
        for path, make, param in ((serve.PLAIN, lambda text: {"prompt": text}, "prompt"),
                                  (serve.PLAIN, lambda text: {"prompt": ["a", text]}, "prompt[1]"),
                                  (serve.CHAT, lambda text: serve.asking(text, "What?"), "messages"),
                                  ("/tokenize", lambda text: {"content": text}, "content")):
            for megabytes, words in ((60, "the context of 4096 tokens cannot hold such a prompt"),
                                     (1, r"bytes; expected at most \d+: the context has 4096 tokens of up to \d+ bytes")):
                error = self.check_error(server.request("POST", path, make(megabytes * 10**6 * "a")), 400)
                self.assertEqual(error["code"], "context_length_exceeded")
                self.assertRegex(error["message"], words)
                self.assertEqual(error["param"], param if megabytes == 1 else None)
        # The tokenizer takes 3 GB for one of these texts. The limits see the length alone.
        self.assertLess(peak_bytes(pid), 1 << 30)
        error = self.check_error(server.request("POST", serve.PLAIN, {"prompt": 5000 * [7]}), 400, "prompt")
        self.assertEqual(error["code"], "context_length_exceeded")
        self.stop(server)

    def test_many_long_prompts_at_once(self):
        """Others are answered before the server has worked on all of them."""
        server = self.start(*serve.PRUNED, "--max-sequences", "4", "--max-queue", "4")
        body = json.dumps({"prompt": 8000 * "words "}).encode()  # refused by its number of tokens
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        clients = [socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) for _ in range(72)]
        for client in clients:
            self.addCleanup(client.close)
            client.sendall(head + body[:-1])
        for client in clients:
            client.sendall(body[-1:])
        self.assertEqual(server.get("/health"), {"status": "ok"})
        statuses = {client.recv(15) for client in clients}
        self.assertLessEqual(statuses, {b"HTTP/1.1 400 Ba", b"HTTP/1.1 503 Se"})
        self.stop(server)

    def test_many_values(self):
        """A body whose values use up the memory is refused, and the server lives on."""
        server = self.start(*serve.PRUNED, "-t", "1")
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.prlimit(server.process.pid, resource.RLIMIT_AS, (500000 << 10, hard))
        bodies = [b'{"x":[' + (value + b",") * ((6 << 20) // (len(value) + 1)) + value + b"]}"
                  for value in (b"[]", b"{}", b"0", b'""', b"[[0]]", b'{"a":0}')]
        bodies.append(b'{"x":' + b"[" * (1 << 20))
        statuses, lock = [], threading.Lock()

        def ask(body):
            try:
                status, _, reply = server.request("POST", serve.PLAIN, body)
            except ConnectionError:  # without memory to read the body, its connection ends
                status, reply = None, b""
            with lock:
                statuses.append((status, reply))

        for body in bodies:
            threads = [threading.Thread(target=ask, args=(body,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertIsNone(server.process.poll(), server.log())
        self.assertEqual(len(statuses), 3 * len(bodies))
        for status, reply in statuses:
            self.assertIn(status, (400, 503, None), reply)
        self.assertIn(400, dict(statuses))
        try:
            answer = server.post(serve.CHAT, serve.ASK)
        except (AssertionError, OSError, http.client.HTTPException) as error:
            # Products of matrices need up to 128 MiB, by instruction set: an error, not a crash. Without memory for the
            # request itself, its connection ends.
            told = f"{error}\n{server.log()}"
            self.assertRegex(told, r"out of memory|server's memory|closed connection")
            self.assertIn(server.process.poll(), (None, 1), told)
            return
        self.assertEqual(serve.text_of(answer), serve.CASE["expected"])
        self.stop(server)

    def test_kept_states(self):
        """They take no more than --prefix-memory beside running requests."""
        server = self.start(*serve.PRUNED, "--prefix-memory", "3MB")
        for number in range(5):
            server.post(serve.CHAT, serve.asking(f"{number}. " + serve.CASE["context"], "What?", max_tokens=2))
        there = server.wait_until_idle()
        self.assertGreater(server.metrics()["kvzap_prefixes_evicted_total"], 0)
        self.assertGreater(there["prefixes"], 0)
        self.assertLess(there["kv_allocated"], 6e6)
        self.stop(server)
        for none in ("1B", "0"):
            server = self.start(*serve.PRUNED, "--prefix-memory", none)
            server.post(serve.CHAT, serve.ASK)
            self.assertEqual(server.wait_until_idle()["prefixes"], 0)
            self.stop(server)

    def start_with_keys(self):
        file = self.folder / "keys"
        file.write_text("secret\n")
        file.chmod(0o600)
        return self.start(*serve.PRUNED, "--api-key-file", file)

    def test_guesses_of_a_key(self):
        server = self.start_with_keys()

        def status(key):
            return server.request("GET", "/v1/models", headers={"Authorization": key} if key else {})

        self.assertEqual([status(key)[0] for key in ("Bearer secret", "bearer secret", "BEARER  secret")], [200] * 3)
        statuses = [status(f"Bearer {number}")[0] for number in range(100)]
        self.assertEqual(statuses[:20], [401] * 20)
        self.assertGreater(statuses.count(429), 50)
        reply = status("Bearer another")
        self.check_error(reply, 429)
        self.assertGreaterEqual(int(reply[1]["Retry-After"]), 1)
        # Guesses do not lock out who has a key.
        self.assertEqual(status("Bearer secret")[0], 200)
        self.assertEqual(status(None)[0], 401)  # no guess
        self.assertEqual(server.get("/health"), {"status": "ok"})
        self.stop(server)

    def test_key_file_that_is_a_pipe(self):
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        result = run_command([KVZAP, "serve", "-m", MODEL, "--port", "0", "--api-key-file", pipe])
        self.fail_with(result, "expected a regular file, found a pipe", "--api-key-file")

    def test_lines_of_a_key_file(self):
        file = self.folder / "keys"
        for text, fault in ((b"\xef\xbb\xbfsecret\n", "line 1 begins with a byte order mark"),
                            (b"secret\n# mine\n", "line 2 is a comment"), (b"secret \n", "line 1 ends with a blank"),
                            (b"my secret\n", "line 1 has a blank"), (b"se\xffcret\n", "line 1 has the byte 0xff")):
            file.write_bytes(text)
            self.fail_with(run_command([KVZAP, "serve", "-m", MODEL, "--port", "0", "--api-key-file", file]), fault,
                           "--api-key-file")


class Queue(serve.ServerTest):
    """A client that fills the queue does not keep out another one."""

    def test_room_for_another_key(self):
        keys = self.folder / "keys"
        keys.write_text("one\ntwo\n")
        keys.chmod(0o600)
        server = self.start(*serve.ENDLESS, *serve.PRUNED, "--api-key-file", keys, "--max-sequences", "1", "--max-queue", "1")

        def send(key, body):
            connection = server.connect()
            self.addCleanup(connection.close)
            connection.request("POST", serve.PLAIN, json.dumps(body),
                               {"Content-Type": "application/json", "Authorization": f"Bearer {key}"})
            return connection

        def counts():
            _, _, body = server.request("GET", "/metrics", headers={"Authorization": "Bearer one"})
            found = re.findall(rb"^kvzap_requests_(running|waiting)\{.*\} (\d+)$", body, re.M)
            return {name.decode(): int(count) for name, count in found}

        def wait_for(**wanted):
            end = time.monotonic() + PATIENCE
            while counts() != wanted:
                self.assertLess(time.monotonic(), end, server.log())
                time.sleep(0.01)

        endless = {"prompt": [5, 6, 7], "max_tokens": -1, "ignore_eos": True}
        first = send("one", endless)
        wait_for(running=1, waiting=0)
        waiting = send("one", endless)
        wait_for(running=1, waiting=1)
        refused = send("one", endless).getresponse()
        self.assertEqual(refused.status, 429, refused.read())
        self.assertGreaterEqual(int(refused.headers["Retry-After"]), 1)
        other = send("two", {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True})
        wait_for(running=1, waiting=2)
        self.assertEqual(send("two", endless).getresponse().status, 429)
        waiting.close()
        first.close()
        self.assertEqual(other.getresponse().status, 200)
        self.stop(server)


class Places(serve.ServerTest):
    """As many requests as places and queue have room for are never refused; more of them get 429 until there is room."""

    def answers(self, server, clients, each):
        """Statuses of requests that clients send one after the other, with the values of Retry-After."""
        found, lock = [], threading.Lock()

        def client(number):
            for k in range(each):
                status, headers, _ = server.request("POST", serve.PLAIN, {"prompt": f"{number} {k}", "max_tokens": 2 + k % 3, "ignore_eos": True})
                with lock:
                    found.append((status, headers["Retry-After"]))

        threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def test_overload(self):
        server = self.start(*serve.PRUNED, "--max-sequences", "2", "--max-queue", "2")
        self.assertEqual(set(self.answers(server, 4, 40)), {(200, None)})
        found = self.answers(server, 24, 10)
        self.assertEqual({status for status, _ in found}, {200, 429})
        self.assertTrue(all(int(wait) >= 1 for status, wait in found if status == 429))
        self.assertEqual(server.metrics()["kvzap_requests_refused_total"], sum(status == 429 for status, _ in found))
        self.assertEqual(set(self.answers(server, 4, 10)), {(200, None)})
        self.stop(server)


class Crowd(serve.ServerTest):
    """More connections than places, whose clients make the server wait and come again: others are served."""
    FLAGS = [*serve.PRUNED, "--max-sequences", "4", "--max-queue", "4"]
    HEAD = b"Host: localhost\r\n"
    HEALTH = b"GET /health HTTP/1.1\r\n" + HEAD + b"\r\n"
    POST = b"POST /tokenize HTTP/1.1\r\n" + HEAD
    # What a client sends at once, and what each second.
    KINDS = [(b"", b""), (HEALTH[:-2], b"X: y\r\n"), (POST + b"Content-Length: 100000\r\n\r\n{", b" "),
             (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"), (HEALTH, HEALTH),
             (20 * (b"GET / HTTP/1.1\r\n" + HEAD + b"\r\n"), b"")]

    def attack(self, port, is_there, stop):
        clients = {}
        while not stop.is_set():
            for number in range(PLACES + 60):
                opening, more = self.KINDS[number % len(self.KINDS)]
                client = clients.get(number)
                try:
                    if client is None:
                        client = clients[number] = socket.create_connection(("127.0.0.1", port), timeout=1)
                        client.setblocking(False)
                        client.send(opening)
                    elif more:
                        client.send(more)
                        if more == self.HEALTH and client.recv(4096) == b"":
                            raise ConnectionError
                except BlockingIOError:
                    pass
                except OSError:
                    if client:
                        client.close()
                        clients[number] = None
                if stop.is_set():
                    break
            is_there.set()
            stop.wait(0.3)
        for client in clients.values():
            if client:
                client.close()

    def check(self, server, headers):
        allow_descriptors()
        is_there, stop = threading.Event(), threading.Event()
        attacker = threading.Thread(target=self.attack, args=(server.port, is_there, stop))
        attacker.start()
        try:
            self.assertTrue(is_there.wait(PATIENCE))
            for _ in range(4):
                begin = time.monotonic()
                self.assertEqual(server.get("/health"), {"status": "ok"})
                self.assertEqual(serve.text_of(server.post(serve.CHAT, serve.ASK, headers)), serve.CASE["expected"])
                # Without a remedy they take 30 s: until the server gives up the others.
                self.assertLess(time.monotonic() - begin, 15)
                time.sleep(0.5)
        finally:
            stop.set()
            attacker.join()

    def test_clients_without_a_key(self):
        file = self.folder / "keys"
        file.write_text("secret\n")
        file.chmod(0o600)
        server = self.start(*self.FLAGS, "--api-key-file", file)
        self.check(server, {"Authorization": "Bearer secret"})
        self.stop(server)

    def test_server_without_keys(self):
        server = self.start(*self.FLAGS)
        self.check(server, {})
        self.stop(server)

    def test_bodies_that_stall(self):
        """They use up the memory for bodies: those go that arrive most slowly. Small bodies need none of it."""
        server = self.start(*serve.ENDLESS, *serve.PRUNED)
        size, block = 64 << 20, b" " * (1 << 20)
        clients = []
        for _ in range(8):
            client = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
            self.addCleanup(client.close)
            client.sendall(b"POST /detokenize HTTP/1.1\r\n" + self.HEAD + b"Content-Length: %d\r\n\r\n" % size)
            for _ in range(63):
                client.sendall(block)
            client.sendall(block[1:])
            clients.append(client)
        self.assertEqual(list(server.post("/tokenize", {"content": "a"})), ["tokens"])
        self.assertEqual(list(server.post("/detokenize", {"tokens": 300000 * [5]})), ["content"])
        self.assertEqual(clients[0].recv(12), b"HTTP/1.1 503")
        for client in clients:
            client.close()
        self.stop(server)

    def test_nobody_reads_the_log(self):
        process = subprocess.Popen(list(map(str, [KVZAP, "serve", "-m", MODEL, "--port", "0", *serve.PRUNED])),
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.kill)
        port = None
        while port is None:
            found = re.search(rb"listening on http://127\.0\.0\.1:(\d+)$", process.stderr.readline().rstrip())
            port = found and int(found.group(1))

        def ask(count, path="/none"):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            for _ in range(count):
                connection.request("GET", path)
                response = connection.getresponse()
                response.read()
            connection.close()
            return response.status

        self.assertEqual(ask(1500), 404)
        self.assertEqual(ask(1, "/health"), 200)
        os.set_blocking(process.stderr.fileno(), False)
        while os.read(process.stderr.fileno(), 1 << 20):
            if not select.select([process.stderr], [], [], 0)[0]:
                break
        self.assertEqual(ask(1), 404)
        self.assertRegex(os.read(process.stderr.fileno(), 1 << 16),
                         rb"^kvzap: note: \d+ lines lost: nobody read standard error\n\S+ 127\.0\.0\.1 \S+ GET /none 404")
        self.assertEqual(ask(1500), 404)
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(PATIENCE), 0)


class Names(serve.ServerTest):
    """A page of another server that has its own name lead to this machine."""

    def check(self, server, names):
        for name, expected in names.items():
            host = f"{name}:{server.port}"
            for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
                for path in ("/v1/models", "/health"):
                    reply = server.request("GET", path, headers=headers)
                    self.assertEqual(reply[0], expected, (headers, reply[2]))
                    if expected == 403:
                        self.assertIn("--allowed-hosts", self.check_error(reply, 403)["message"])
        for origin in ("http://evil.com", "null", f"http://127.0.0.1:{server.port + 1}", "http://127.0.0.1"):
            reply = server.request("GET", "/v1/models", headers={"Origin": origin})
            self.assertIn("page of another server", self.check_error(reply, 403)["message"])

    def test_names(self):
        server = self.start(*serve.PRUNED)
        self.check(server, {"127.0.0.1": 200, "localhost": 200, "LocalHost.": 200, "127.0.0.2": 200, "[::1]": 200,
                            "evil.com": 403, "127.0.0.1.evil.com": 403, "localhost.evil.com": 403, "10.0.0.1": 403,
                            "[::2]": 403, "0x7f.1": 403})
        self.assertEqual(server.request("GET", "/health", headers={"Host": "[::ffff:127.0.0.1]:80"})[0], 200)
        for host in ("", "[::1].evil.com", "[::1]evil.com:80", "[::1", "[localhost]", "localhost:80.evil.com",
                     "localhost:evil", "[::1]:evil", ".", ":80", "::1"):
            error = self.check_error(server.request("GET", "/health", headers={"Host": host}), 400)
            self.assertIn("expected a name or address", error["message"])
        for host in ("evil.com", "127.0.0.1@evil.com"):
            self.assertIn(server.request("POST", serve.CHAT, serve.ASK, {"Host": host})[0], (400, 403))
        self.stop(server)

    def test_more_names(self):
        server = self.start(*serve.PRUNED, "--allowed-hosts", "Chat.example.org,box")
        self.check(server, {"127.0.0.1": 200, "chat.example.org": 200, "BOX": 200, "evil.com": 403,
                            "example.org": 403})
        self.stop(server)

    def test_other_forms_of_loopback_addresses(self):
        for host in ("::ffff:127.0.0.1", "[::ffff:127.0.0.1]"):
            server = self.start(*serve.PRUNED, "--host", host)
            self.check(server, {"127.0.0.1": 200, "evil.com": 403})
            self.stop(server)

    def test_keys_allow_all_names(self):
        file = self.folder / "keys"
        file.write_text("secret\n")
        server = self.start(*serve.PRUNED, "--api-key-file", file)
        headers = {"Host": "evil.com", "Origin": "http://evil.com"}
        self.check_error(server.request("GET", "/v1/models", headers=headers), 401)
        headers["Authorization"] = "Bearer secret"
        self.assertEqual(server.request("GET", "/v1/models", headers=headers)[0], 200)
        self.stop(server)

    def test_bad_names(self):
        for name in ("http://chat.example.org", "one,me@two", "one two", "*", "*.example.org", "[::1"):
            result = run_command([KVZAP, "serve", "-m", MODEL, "--port", "0", "--allowed-hosts", name])
            self.fail_with(result, "--allowed-hosts has ")


if __name__ == "__main__":
    unittest.main()
