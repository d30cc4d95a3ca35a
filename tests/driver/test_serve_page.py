"""The page of `kvzap serve` in a real browser: Chromium without a screen, driven through its DevTools. Skipped where there
is none ($KVZAP_CHROMIUM names one). $KVZAP_PAGE_SCREENSHOT is a file for a picture of it."""
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
import time
import unittest
import urllib.request

from harness import CASES, KVZAP, MLP, MODEL, PATIENCE, TestCase

NAMES = [os.environ.get("KVZAP_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome", "chrome"]
CHROMIUM = next((found for name in NAMES if name and (found := shutil.which(name))), None)
CASE = CASES[0]


class DevTools:
    """As much of the WebSocket protocol (RFC 6455) as commands and their results need."""

    def __init__(self, url):
        host, port, path = re.match(r"ws://([^:/]+):(\d+)(/.*)", url).groups()
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall((f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
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
        self.addCleanup(self.end)

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stderr.close()

    def start(self, command, pattern):
        """A process; returns what its standard error says by the pattern."""
        process = subprocess.Popen([str(part) for part in command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
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
                            "--remote-debugging-port=0", "--no-first-run", f"--user-data-dir={self.folder / 'profile'}",
                            f"--window-size={size[0]},{size[1]}", "about:blank"], r"DevTools listening on (ws://\S+)")
        port = re.search(r":(\d+)/", tools)[1]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE) as reply:
            page = next(one for one in json.load(reply) if one["type"] == "page")
        browser = DevTools(page["webSocketDebuggerUrl"])
        self.addCleanup(browser.close)
        browser.call("Emulation.setDeviceMetricsOverride", width=size[0], height=size[1], deviceScaleFactor=1, mobile=False)
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
        browser = self.open()
        browser.wait_for("document.getElementById('model').textContent === 'recall-4m'")
        self.type(browser, "document", CASE["context"])
        self.type(browser, "max-tokens", "24")
        self.type(browser, "message", CASE["question"].strip())
        self.enter(browser)
        note = browser.wait_for("document.querySelector('.note')?.textContent")
        self.assertRegex(note, r"^\d+ tokens asked \(0 were there\), \d+ answered$")
        answers = "[...document.querySelectorAll('.message:not(.user)')].map(of => of.textContent)"
        answer, = browser.value(answers)
        self.assertTrue(answer)
        self.assertRegex(browser.value("document.getElementById('last-evicted').textContent"), r"^[1-9]\d?\.\d %$")
        self.assertRegex(browser.value("document.getElementById('last-bytes').textContent"), r"^[\d.]+ [kM]B$")
        browser.wait_for("document.getElementById('prefixes').textContent >= '1'")
        self.assertRegex(browser.value("document.getElementById('taken').textContent"), r"^[\d.]+ [kM]B$")
        # What was said before is in the cache.
        self.type(browser, "message", "And what else?")
        browser.value("document.getElementById('send').click()")
        note = browser.wait_for("document.querySelectorAll('.note')[1]?.textContent")
        asked, there = map(int, re.search(r"^(\d+) tokens asked \((\d+) were there\)", note).groups())
        self.assertGreater(there, CASE["n_context"])
        self.assertLess(asked - there, 40)
        self.assertEqual(len(browser.value(answers)), 2)
        picture = os.environ.get("KVZAP_PAGE_SCREENSHOT")
        if picture:
            data = browser.call("Page.captureScreenshot", format="png")["data"]
            pathlib.Path(picture).write_bytes(base64.b64decode(data))
        browser.value("document.getElementById('new').click()")
        self.assertEqual(browser.value(answers), [])
        # A page as narrow as a telephone has nothing to scroll sideways.
        browser.call("Emulation.setDeviceMetricsOverride", width=360, height=700, deviceScaleFactor=1, mobile=True)
        self.assertLessEqual(browser.value("document.documentElement.scrollWidth"), 360)

    def test_running_sequence_and_stop(self):
        browser = self.open("--random-weights", "1", "-c", "1000000")
        self.type(browser, "max-tokens", "900000")
        self.type(browser, "message", "Tell me")
        self.enter(browser)
        browser.wait_for("[...document.querySelectorAll('#sequences tr')].some(of => of.cells[1].textContent === 'decode'"
                         " && Number(of.cells[3].textContent) > 10)")
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
        self.type(browser, "key", "secret-1")
        browser.wait_for("document.getElementById('model').textContent === 'recall-4m'")
        self.type(browser, "message", "a " * 5000)
        self.enter(browser)
        self.assertIn("the context has room for", browser.wait_for("document.querySelector('.error.message')?.textContent"))


if __name__ == "__main__":
    unittest.main()
