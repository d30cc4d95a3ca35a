"""The page of `kvzap serve` in a real browser: Chromium without a screen, driven through its DevTools. Skipped where
there is none ($KVZAP_CHROMIUM names one). $KVZAP_PAGE_SCREENSHOT is a file for a picture of it."""
import base64
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
import unittest
import urllib.request

from harness import CASES, KVZAP, MLP, MODEL, PATIENCE, TestCase

NAMES = [os.environ.get("KVZAP_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome", "chrome"]
CHROMIUM = next((found for name in NAMES if name and (found := shutil.which(name))), None)
CASE = CASES[0]
# A stream of the server's kind: text that looks like a page, characters of several bytes, a sign of life; and its end.
TEXT = "<img src=x onerror=\"document.title='run'\"></script>\n é 中 😀 &amp; <b>\"data: [DONE]\"</b>"
STREAM = "".join(
    f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
    for event in [{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}]
    + [{"choices": [{"index": 0, "delta": {"content": TEXT[i : i + 7]}}]} for i in range(0, len(TEXT), 7)]
) + ": in progress\n\n"
LAST = ('data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
        'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":7,'
        '"prompt_tokens_details":{"cached_tokens":4}},'
        '"kvzap":{"evict_ratio":0.25,"kv_bytes":750,"full_kv_bytes":1000}}\n\ndata: [DONE]\n\n')


class DevTools:
    """As much of the WebSocket protocol (RFC 6455) as commands and their results need."""

    def __init__(self, url):
        host, port, path = re.match(r"ws://([^:/]+):(\d+)(/.*)", url).groups()
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall((f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n"
                             "Upgrade: websocket\r\nConnection: Upgrade\r\n"
                             f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n").encode())
        self.stream = self.socket.makefile("rb")
        while self.stream.readline().strip():
            pass
        self.number = 0

    def close(self):
        self.stream.close()
        self.socket.close()

    def send(self, text):
        data = text.encode()
        size = (bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack(">H", len(data))
                if len(data) < 1 << 16 else b"\xff" + struct.pack(">Q", len(data)))
        self.socket.sendall(b"\x81" + size + b"\0\0\0\0" + data)  # a mask of zeros changes nothing

    def receive(self):
        whole = b""
        while True:
            first, second = self.stream.read(2)
            size = second & 0x7f
            if size == 126:
                size, = struct.unpack(">H", self.stream.read(2))
            elif size == 127:
                size, = struct.unpack(">Q", self.stream.read(8))
            data = self.stream.read(size)
            if first & 0x0f in (0, 1):
                whole += data
                if first & 0x80:
                    return json.loads(whole)

    def call(self, method, **parameters):
        self.number += 1
        self.send(json.dumps({"id": self.number, "method": method, "params": parameters}))
        while (message := self.receive()).get("id") != self.number:
            pass
        if "error" in message:
            raise AssertionError(message["error"])
        return message["result"]

    def value(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"])
        return result["result"].get("value")

    def wait_for(self, expression):
        end = time.monotonic() + PATIENCE
        while not (value := self.value(expression)):
            if time.monotonic() > end:
                raise AssertionError(f"{expression} never comes: {self.value('document.body.innerText')}")
            time.sleep(0.05)
        return value


@unittest.skipUnless(CHROMIUM, "needs Chromium")
class Page(TestCase):
    def setUp(self):
        super().setUp()
        self.processes = []
        self.profile = tempfile.mkdtemp(prefix="kvzap-page-")
        self.addCleanup(shutil.rmtree, self.profile, ignore_errors=True)
        self.addCleanup(self.end)

    def end(self):
        for process in self.processes:
            os.killpg(process.pid, signal.SIGKILL)  # a browser is many processes
            process.wait()
            process.stderr.close()

    def start(self, command, pattern):
        """A process; returns what its standard error says by the pattern."""
        process = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                   start_new_session=True)
        self.processes.append(process)
        seen = ""
        while not (found := re.search(pattern, seen)):
            line = process.stderr.readline().decode(errors="replace")
            self.assertTrue(line, f"{command[0]} has ended: {seen}")
            seen += line
        return found[1]

    def open(self, *flags, size=(1280, 800)):
        url = self.start([KVZAP, "serve", "-m", MODEL, "--surrogate", MLP, "--threshold", "-3.4", "--window", "32",
                          "--port", "0", "-q", *flags], r"listening on (http://\S+)")
        tools = self.start([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                            "--remote-debugging-port=0", "--no-first-run", f"--user-data-dir={self.profile}",
                            f"--window-size={size[0]},{size[1]}", "about:blank"], r"DevTools listening on (ws://\S+)")
        port = re.search(r":(\d+)/", tools)[1]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as reply:
            page = next(one for one in json.load(reply) if one["type"] == "page")
        browser = DevTools(page["webSocketDebuggerUrl"])
        self.addCleanup(browser.close)
        browser.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1,
                     mobile=False)
        browser.call("Page.enable")
        browser.call("Page.navigate", url=url)
        browser.wait_for("document.readyState === 'complete' && !!document.getElementById('send')")
        return browser

    @staticmethod
    def type(browser, where, text):
        browser.value(f"(() => {{ const of = document.getElementById({json.dumps(where)}); of.focus(); "
                      f"of.value = {json.dumps(text)}; of.dispatchEvent(new Event('change')); }})()")

    @staticmethod
    def enter(browser):
        for kind in "keyDown", "keyUp":
            browser.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13,
                         **({"text": "\r"} if kind == "keyDown" else {}))

    def test_a_conversation(self):
        browser = self.open("--kv-memory", "64MiB")
        browser.wait_for("document.getElementById('model').textContent === 'recall-4m'")
        self.type(browser, "document", CASE["context"])
        self.type(browser, "max-tokens", "24")
        self.type(browser, "message", CASE["question"].strip())
        self.enter(browser)
        note = browser.wait_for("document.querySelector('.note')?.textContent")
        self.assertRegex(note, r"^\d+ prompt tokens \(0 cached\), \d+ new tokens; "
                               r"[1-9]\d?\.\d % evicted: [\d.]+ kB of [\d.]+ [kM]B$")
        answers = "[...document.querySelectorAll('.message:not(.user)')].map(of => of.textContent)"
        answer, = browser.value(answers)
        self.assertTrue(answer)
        self.assertRegex(browser.value("document.getElementById('last-evicted').textContent"), r"^[1-9]\d?\.\d %$")
        self.assertRegex(browser.value("document.getElementById('last-bytes').textContent"), r"^[\d.]+ [kM]B$")
        browser.wait_for("document.getElementById('prefixes').textContent >= '1'")
        self.assertRegex(browser.value("document.getElementById('taken').textContent"), r"^[\d.]+ [kM]B$")
        # The earlier messages are in the cache.
        self.type(browser, "message", "And what else?")
        browser.value("document.getElementById('send').click()")
        note = browser.wait_for("document.querySelectorAll('.note')[1]?.textContent")
        asked, there = map(int, re.search(r"^(\d+) prompt tokens \((\d+) cached\)", note).groups())
        self.assertGreater(there, CASE["n_context"])
        self.assertLess(asked - there, 40)
        self.assertEqual(len(browser.value(answers)), 2)
        self.type(browser, "max-tokens", "1")
        self.type(browser, "message", "Why?")
        self.enter(browser)
        note = browser.wait_for("document.querySelectorAll('.note')[2]?.textContent")
        self.assertIn(" 1 new tokens; ", note)
        self.assertTrue(note.endswith('; the answer was cut: raise "Maximum new tokens"'), note)
        picture = os.environ.get("KVZAP_PAGE_SCREENSHOT")
        if picture:
            # Others ask, too.
            prompt = json.dumps(CASE["context"])
            browser.value(f"""window.others = new AbortController();
                for (let i = 0; i < 3; ++i) fetch("v1/completions", {{method: "POST", signal: others.signal, body:
                  JSON.stringify({{prompt: {prompt}.slice(i), ignore_eos: true, max_tokens: 3500, stream: true}})}})
                  .then(of => of.text()).catch(() => 0); 0""")
            browser.wait_for("document.getElementById('sequences').textContent.match(/decode/g)?.length === 3")
            data = browser.call("Page.captureScreenshot", format="png")["data"]
            pathlib.Path(picture).write_bytes(base64.b64decode(data))
            browser.value("others.abort()")
        browser.value("document.getElementById('new').click()")
        self.assertEqual(browser.value(answers), [])
        # Nothing to scroll sideways, be it as narrow as a telephone.
        browser.value("document.getElementById('more').open = true")
        for width in 1400, 800, 360:
            browser.call("Emulation.setDeviceMetricsOverride", width=width, height=700, deviceScaleFactor=1,
                         mobile=width < 800)
            for of in "documentElement", "querySelector('main')", "querySelector('aside')", "getElementById('more')":
                over = browser.value(f"document.{of}.scrollWidth - document.{of}.clientWidth")
                self.assertLessEqual(over, 0, (of, width))

    @staticmethod
    def play(browser, stream, cut):
        """The next answer is this stream, in pieces of so many bytes; window.asked gets what the page asks."""
        data = base64.b64encode(stream.encode()).decode()
        browser.value(f"""(() => {{
            window.real = window.real || window.fetch;
            window.asked = window.asked || [];
            window.fetch = async (path, options) => {{
              if (!path.endsWith("completions")) return real(path, options);
              asked.push(JSON.parse(options.body));
              const data = Uint8Array.from(atob("{data}"), of => of.charCodeAt(0));
              let at = 0;
              return new Response(new ReadableStream({{pull(to) {{
                if (at < data.length) to.enqueue(data.slice(at, at += {cut})); else to.close();
              }}}}));
            }};
        }})()""")

    def test_streams_however_cut(self):
        browser = self.open()
        said = "document.querySelector('#messages').innerText"
        last = "[...document.querySelectorAll('.message:not(.user):not(.error)')].at(-1)?.textContent"
        file = self.folder / "document.txt"
        file.write_text("Ünder\nthe sea\n")
        root = browser.call("DOM.getDocument")["root"]["nodeId"]
        node = browser.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
        browser.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])
        browser.wait_for("document.getElementById('document').value === 'Ünder\\nthe sea\\n'")
        self.type(browser, "threshold", "-3.5")
        for number, (stream, cut) in enumerate([(STREAM + LAST, 1), (STREAM + LAST, 5), (STREAM + LAST, 1 << 20),
                                                ((STREAM + LAST).replace("\n\n", "\r\n\r\n"), 3)], start=1):
            self.play(browser, stream, cut)
            self.type(browser, "message", f"Question {number}")
            self.enter(browser)
            browser.wait_for(f"document.querySelectorAll('.note').length === {number}")
            self.assertEqual(browser.value(last), TEXT)
        self.assertEqual(browser.value("document.querySelectorAll('#messages img, #messages b').length"), 0)
        self.assertEqual(browser.value("document.title"), "kvzap")
        self.assertEqual(browser.value("[...document.querySelectorAll('.note')].at(-1).textContent"),
                         "9 prompt tokens (4 cached), 7 new tokens; 25.0 % evicted: 750 B of 1.00 kB")
        first, second = browser.value("asked.slice(0, 2)")
        self.assertEqual(first["kvzap"], {"threshold": -3.5})
        self.assertTrue(first["stream"])
        question = {"role": "user", "content": [{"type": "text", "text": "Ünder\nthe sea\n"},
                                                {"type": "text", "text": "\n\nQuestion 1"}]}
        self.assertEqual(first["messages"], [question])
        self.assertEqual(second["messages"], [question, {"role": "assistant", "content": TEXT},
                                              {"role": "user", "content": "Question 2"}])
        # What has come stays when the rest does not come.
        for stream, error in [(STREAM, "the answer was cut off"),
                              (STREAM + 'data: {"error":{"message":"a fault"}}\n\n' + LAST, "a fault")]:
            self.play(browser, stream, 11)
            self.type(browser, "message", "Once more")
            self.enter(browser)
            browser.wait_for(f"{said}.includes({json.dumps(error)})")
            self.assertEqual(browser.value(last), TEXT)
        # Where nothing has come the message is there to be sent again.
        browser.value("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
        self.type(browser, "message", "And now?")
        self.enter(browser)
        browser.wait_for(f"{said}.includes('the server cannot be reached')")
        self.assertEqual(browser.value("document.getElementById('message').value"), "And now?")
        self.assertNotIn("And now?", browser.value(said))

    def test_running_sequence_and_stop(self):
        browser = self.open("--random-weights", "1", "-c", "1000000")
        self.type(browser, "max-tokens", "900000")
        self.type(browser, "message", "Tell me")
        self.enter(browser)
        browser.wait_for("[...document.querySelectorAll('#sequences tr')]"
                         ".some(of => of.cells[1].textContent === 'decode' && Number(of.cells[3].textContent) > 10)")
        browser.value("document.getElementById('stop').click()")
        browser.wait_for("document.querySelector('.note')?.textContent === 'stopped'")
        browser.wait_for("document.getElementById('counts').textContent === '0, 0'")

    def test_errors_and_key(self):
        key = self.folder / "key"
        key.write_text("secret-1\n")
        key.chmod(0o600)
        browser = self.open("--api-key-file", key)
        browser.wait_for("!document.getElementById('key-row').hidden")
        self.assertIn("key", browser.wait_for("document.getElementById('status-error').textContent"))
        # A key that is wrong, and one that is given while the reply to that is under way.
        self.type(browser, "message", "Hello")
        self.type(browser, "key", "secret-2")
        browser.value("document.getElementById('send').click()")  # the field may be gone, and with it who has the focus
        browser.wait_for("document.querySelector('.error.message')?.textContent.includes('key')")
        self.assertEqual(browser.value("document.getElementById('message').value"), "Hello")
        self.assertFalse(browser.value("document.getElementById('key-row').hidden"))
        browser.value("""(() => {
            const real = window.fetch;
            window.fetch = async (path, options) => {
              const reply = await real(path, options);
              await new Promise(after => setTimeout(after, reply.ok ? 0 : 1500));
              return reply;
            };
        })()""")
        self.type(browser, "key", "secret-3")
        self.type(browser, "key", "secret-1")
        browser.value("document.getElementById('new').click()")
        browser.wait_for("document.getElementById('model').textContent === 'recall-4m'")
        self.assertEqual(browser.value("sessionStorage.getItem('kvzap-key')"), "secret-1")
        self.assertTrue(browser.value("document.getElementById('key-row').hidden"))
        self.type(browser, "message", "a " * 5000)
        self.enter(browser)
        error = browser.wait_for("document.querySelector('.error.message')?.textContent")
        self.assertIn("expected at most 4096, the length of the context", error)


if __name__ == "__main__":
    unittest.main()
