"""The page of `kvzap serve`: its scripts in Node, and all of it in a real browser, Chromium without a screen, driven
through its DevTools. Skipped where there is none ($KVZAP_CHROMIUM names one). $KVZAP_PAGE_SCREENSHOT is a file for a
picture of the page; $KVZAP_PAGE_SCREENSHOTS a folder for others, of the narrow and the dark page."""
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

from harness import CASES, KVZAP, MLP, MODEL, PATIENCE, SOURCE, TestCase

NAMES = [os.environ.get("KVZAP_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome", "chrome"]
CHROMIUM = next((found for name in NAMES if name and (found := shutil.which(name))), None)
NODE = shutil.which("node")
PRUNED = ["--surrogate", MLP, "--threshold", "-3.4", "--window", "32"]
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


ANSWERS = "[...document.querySelectorAll('.assistant .text')].map(of => of.innerText)"
NOTES = ".message > .note"
SHOWN = TEXT.replace("\n ", "\n")


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


def channels(colour):
    """Red, green, blue and opacity of a computed colour, from 0 to 1."""
    numbers = [float(number) for number in re.findall(r"[\d.]+", colour)] or [0, 0, 0, 0]
    return [number / 255 for number in numbers[:3]] + [numbers[3] if len(numbers) > 3 else 1]


def over(colour, paper):
    *upper, opacity = channels(colour)
    return "rgb({})".format(", ".join(str(255 * (opacity * a + (1 - opacity) * b))
                                      for a, b in zip(upper, channels(paper))))


def contrast(one, other):
    """The ratio of WCAG 2, from 1 to 21."""
    def luminance(colour):
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(colour)[:3]]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@unittest.skipUnless(NODE, "needs Node")
class Scripts(TestCase):
    def test_all(self):
        run = subprocess.run([NODE, "--test", "--test-reporter=tap", SOURCE / "tests/driver/page_scripts.js"], timeout=PATIENCE,
                             env={**os.environ, "KVZAP_PAGE": str(SOURCE / "src/server/page")}, capture_output=True, text=True)
        if "bad option" in run.stderr:
            self.skipTest("needs Node 20")
        self.assertEqual(run.returncode, 0, run.stdout + run.stderr)
        self.assertRegex(run.stdout, r"(?m)^# pass \d\d$")


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

    def open(self, *flags, size=(1400, 800)):
        url = self.start([KVZAP, "serve", "-m", MODEL, "--port", "0", "-q", *flags], r"listening on (http://\S+)")
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
        # What the page refuses and what fails in it.
        browser.call("Page.addScriptToEvaluateOnNewDocument", source="""
            window.faults = [];
            for (const kind of ["error", "unhandledrejection", "securitypolicyviolation"])
              window.addEventListener(kind, event => faults.push(`${kind} ${event.message || event.reason || event.violatedDirective}`));
            window.confirm = () => true;""")
        browser.call("Page.navigate", url=url)
        browser.wait_for("document.readyState === 'complete' && !!document.getElementById('send')")
        return browser

    @staticmethod
    def type(browser, where, text):
        browser.value(f"(() => {{ const of = document.getElementById({json.dumps(where)}); of.focus(); "
                      f"of.value = {json.dumps(text)}; of.dispatchEvent(new Event('change', {{bubbles: true}})); }})()")

    @staticmethod
    def press(browser, key, code, **fields):
        for kind in "keyDown", "keyUp":
            browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                         **(fields if kind == "keyDown" else {}))

    def enter(self, browser):
        self.press(browser, "Enter", 13, text="\r")

    def ask(self, browser, text):
        """Asks, and returns the note below the answer."""
        count = browser.value(f"document.querySelectorAll('{NOTES}').length")
        self.type(browser, "message", text)
        self.enter(browser)
        return browser.wait_for(f"!running && document.querySelectorAll('{NOTES}')[{count}]?.textContent")

    @staticmethod
    def click(browser, text, within="document"):
        """A visible button with this text."""
        browser.value(f"""[...{within}.querySelectorAll("button")].findLast(of => of.textContent === {json.dumps(text)}
            && !of.disabled && of.offsetParent).click()""")

    @staticmethod
    def picture(browser, name):
        folder = os.environ.get("KVZAP_PAGE_SCREENSHOTS")
        if folder:
            data = browser.call("Page.captureScreenshot", format="png")["data"]
            pathlib.Path(folder, name + ".png").write_bytes(base64.b64decode(data))

    def test_a_conversation(self):
        browser = self.open("--kv-memory", "64MiB", "--max-batch-tokens", "128", *PRUNED)
        browser.wait_for("document.getElementById('model').textContent === 'recall-4m'")
        browser.wait_for("!document.getElementById('pruning').hidden")
        self.assertEqual(browser.value("document.getElementById('policy').textContent"), "kvzap")
        self.assertTrue(browser.value("document.getElementById('evict-ratio').parentElement.hidden"))  # not calibrated
        browser.value("""(window.seen = [], new MutationObserver(() => seen.push(
            document.querySelector(".reading div")?.textContent)).observe(document.getElementById("messages"),
            {childList: true, subtree: true, characterData: true}))""")
        self.type(browser, "document", CASE["context"])
        self.type(browser, "max-tokens", "24")
        note = self.ask(browser, CASE["question"].strip())
        self.assertRegex(note, r"^\d+ prompt tokens \(0 cached\), \d+ new tokens; "
                               r"[1-9]\d?\.\d % evicted: [\d.]+ kB of [\d.]+ [kM]B$")
        answer, = browser.value(ANSWERS)
        self.assertTrue(answer)
        self.assertTrue(browser.value("document.getElementById('document').disabled"))
        self.assertRegex(browser.value("document.getElementById('last-evicted').textContent"), r"^[1-9]\d?\.\d %$")
        self.assertRegex(browser.value("document.getElementById('last-bytes').textContent"), r"^[\d.]+ [kM]B$")
        browser.wait_for("document.getElementById('prefixes').textContent >= '1'")
        self.assertRegex(browser.value("document.getElementById('taken').textContent"), r"^[\d.]+ [kM]B$")
        # The prompt was read in several steps.
        read = [re.match(r"Reading: ([\d,]+) of ([\d,]+) tokens", one) for one in browser.value("seen") if one]
        counts = sorted({int(one[1].replace(",", "")) for one in read if one})
        self.assertGreater(len(counts), 2)
        self.assertGreater(counts[-1], CASE["n_context"])
        self.assertEqual(browser.value("document.querySelectorAll('.reading').length"), 0)
        # Which words stayed.
        browser.value("document.querySelector('.kept').open = true")
        browser.wait_for("document.querySelectorAll('.kept pre span').length > 20")
        self.assertIn(CASE["context"], browser.value("document.querySelector('.kept pre').textContent"))
        shades = set(browser.value("[...document.querySelectorAll('.kept pre span')].map(of => of.className)"))
        self.assertGreater(len(shades), 4)
        self.assertIn("k10", shades)  # the window
        self.assertRegex(browser.value("document.querySelector('.kept .note').textContent"), r" had \d+ rows, .* words, \d+ kept all")
        # Letters stay legible on every shade.
        for scheme in "light", "dark":
            browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            colours = browser.value("""["k0", "k5", "k10"].map(name => {
                const all = getComputedStyle(document.body), own = document.querySelector(".legend ." + name);
                return [all.backgroundColor, own ? getComputedStyle(own).backgroundColor : "", getComputedStyle(own).color]; })""")
            for paper, shade, ink in colours:
                self.assertGreater(contrast(ink, over(shade, paper)), 4.5, (scheme, shade))
            self.picture(browser, f"kept-{scheme}")
        browser.value("document.querySelector('.kept').open = false")
        # The earlier messages are in the cache.
        note = self.ask(browser, "And what else?")
        asked, there = map(int, re.search(r"^(\d+) prompt tokens \((\d+) cached\)", note).groups())
        self.assertGreater(there, CASE["n_context"])
        self.assertLess(asked - there, 40)
        self.assertEqual(len(browser.value(ANSWERS)), 2)
        self.assertEqual(browser.value("document.querySelectorAll('.cut').length"), 0)
        # An answer that is cut off, and goes on.
        self.type(browser, "max-tokens", "1")
        self.assertIn(" 1 new tokens; ", self.ask(browser, CASE["question"].strip()))
        cut = browser.value("document.querySelector('.cut').textContent")
        self.assertIn("maximum of new tokens", cut)
        before = browser.value(ANSWERS)[-1]
        self.type(browser, "max-tokens", "24")
        self.click(browser, "Continue")
        browser.wait_for("!running && !document.querySelector('.cut')")
        self.assertTrue(browser.value(ANSWERS)[-1].startswith(before))
        self.assertGreater(len(browser.value(ANSWERS)[-1]), len(before) + 5)
        picture = os.environ.get("KVZAP_PAGE_SCREENSHOT")
        if picture:
            # Others ask, too.
            browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
            prompt = json.dumps(CASE["context"])
            browser.value(f"""window.others = new AbortController();
                document.querySelector(".kept").open = true;
                document.getElementById("messages").scrollTop = 0;
                for (let i = 0; i < 3; ++i) fetch("v1/completions", {{method: "POST", signal: others.signal, body:
                  JSON.stringify({{prompt: {prompt}.slice(i), ignore_eos: true, max_tokens: 3500, stream: true}})}})
                  .then(of => of.text()).catch(() => 0); 0""")
            browser.wait_for("document.getElementById('sequences').textContent.match(/decode/g)?.length === 3")
            data = browser.call("Page.captureScreenshot", format="png")["data"]
            pathlib.Path(picture).write_bytes(base64.b64decode(data))
            browser.value("others.abort()")
        self.click(browser, "New conversation")
        self.assertEqual(browser.value(ANSWERS), [])
        self.assertFalse(browser.value("document.getElementById('document').disabled"))
        self.assertEqual(browser.value("faults"), [])

    def test_layouts(self):
        browser = self.open(*PRUNED)
        browser.wait_for("!document.getElementById('pruning').hidden")
        self.play(browser, STREAM.replace(TEXT[:7], "a | b\\n-|-\\n" + 80 * "x") + LAST, 99)
        self.ask(browser, 90 * "long" + " question")
        browser.value("document.querySelectorAll('#more, #more details').forEach(of => of.open = true)")
        # Nothing to scroll sideways, be it as narrow as a telephone.
        for width in 1400, 1000, 800, 360:
            browser.call("Emulation.setDeviceMetricsOverride", width=width, height=700, deviceScaleFactor=1,
                         mobile=width < 800)
            for panel in None, "history", "memory":
                if panel and browser.value(f"document.getElementById('{panel}').hidden"):
                    browser.value(f"document.getElementById('{panel}-toggle').click()")
                for of in "documentElement", "querySelector('main')", "querySelector('aside')", "querySelector('nav')", \
                        "getElementById('more')", "getElementById('messages')", "querySelector('header')":
                    over = browser.value(f"document.{of}.scrollWidth - document.{of}.clientWidth")
                    self.assertLessEqual(over, 0, (of, width, panel))
                if width == 360:
                    self.picture(browser, f"narrow-{panel}")
                if width < 900 and panel:
                    self.assertTrue(browser.value("document.querySelector('main').hidden"))
                    back = f"{panel}-toggle" if panel == "memory" else "conversations').querySelector('button"
                    browser.value(f"document.getElementById('{back}').click()")
                self.assertFalse(browser.value("document.querySelector('main').hidden && innerWidth > 900"))
        self.assertFalse(browser.value("document.querySelector('main').hidden"))

    def test_names_for_screen_readers(self):
        browser = self.open(*PRUNED)
        browser.wait_for("!document.getElementById('pruning').hidden")
        self.play(browser, STREAM + LAST, 99)
        self.ask(browser, "Hello")
        browser.value("document.querySelectorAll('details').forEach(of => of.open = true)")
        browser.value("document.querySelectorAll('nav, aside').forEach(of => of.hidden = false)")
        tree = browser.call("Accessibility.getFullAXTree")["nodes"]
        controls = [node for node in tree if not node.get("ignored") and node["role"].get("value") in (
            "button", "textbox", "spinbutton", "checkbox", "combobox", "log", "navigation", "complementary", "article", "meter")]
        self.assertGreater(len(controls), 25)
        for node in controls:
            self.assertTrue(node.get("name", {}).get("value", "").strip(), node)
        roles = {node["role"]["value"]: node["name"]["value"] for node in controls}
        self.assertEqual((roles["log"], roles["meter"]), ("Conversation", "Memory in use"))
        # Keys alone reach all of it: every control is in the order of Tab.
        browser.value("document.getElementById('history-toggle').focus()")
        reached = set()
        for _ in range(60):
            reached.add(browser.value("document.activeElement.id || document.activeElement.textContent"))
            self.press(browser, "Tab", 9)
        for name in "history-toggle", "memory-toggle", "new", "messages", "message", "send", "temperature", "Edit", "Regenerate", "clear":
            self.assertIn(name, reached)

    def test_messages_again(self):
        """Edit, regenerate, settings, and what the browser keeps."""
        browser = self.open(*PRUNED)
        browser.wait_for("!document.getElementById('pruning').hidden")
        self.type(browser, "system", "Be brief.")
        self.type(browser, "temperature", "0.5")
        self.type(browser, "threshold", "-3.5")
        browser.value("document.querySelector('[data-field=top_k]').value = '40'")
        self.play(browser, STREAM + LAST, 50)
        self.ask(browser, "One")
        self.ask(browser, "Two")
        body = browser.value("asked.at(-1)")
        self.assertEqual(body["messages"], [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One"},
                                            {"role": "assistant", "content": TEXT}, {"role": "user", "content": "Two"}])
        self.assertEqual({name: body.get(name) for name in ("temperature", "top_k", "max_tokens", "return_progress", "kvzap", "seed")},
                         {"temperature": 0.5, "top_k": 40, "max_tokens": 512, "return_progress": True, "seed": None,
                          "kvzap": {"threshold": -3.5, "return_kept": True}})
        self.click(browser, "Regenerate")
        browser.wait_for("asked.length === 3 && !running")
        self.assertEqual(browser.value("asked[2]"), body)
        self.assertEqual(len(browser.value(ANSWERS)), 2)
        # An answer that fails leaves the old one.
        self.play(browser, 'data: {"error":{"message":"a fault"}}\n\n', 99)
        self.click(browser, "Regenerate")
        browser.wait_for("!running && document.querySelector('.error.message')?.textContent === 'a fault'")
        self.assertEqual(len(browser.value(ANSWERS)), 2)
        # The first message anew: later ones are gone.
        self.play(browser, STREAM + LAST, 50)
        browser.value("document.querySelector('.user button').click()")
        self.press(browser, "Escape", 27)
        browser.wait_for("!document.querySelector('.user textarea')")
        browser.value("document.querySelector('.user button').click()")
        browser.value("document.querySelector('.user textarea').value = 'Three'")
        self.enter(browser)
        browser.wait_for("asked.length === 5 && !running")
        self.assertEqual(browser.value("asked[4].messages.slice(1)"), [{"role": "user", "content": "Three"}])
        self.assertEqual(browser.value("[...document.querySelectorAll('.user .text')].map(of => of.textContent)"), ["Three"])
        # A wrong number is not sent: the fold with it opens.
        browser.value("document.getElementById('more').open = false")
        self.type(browser, "temperature", "-1")
        self.type(browser, "message", "Four")
        self.enter(browser)
        browser.wait_for("document.getElementById('more').open")
        self.assertEqual(browser.value("asked.length"), 5)
        self.type(browser, "temperature", "0.25")
        # Everything is there after a visit elsewhere.
        self.click(browser, "New conversation")
        self.play(browser, STREAM + LAST, 50)
        self.ask(browser, "Another")
        names = "[...document.querySelectorAll('#conversations li')].map(of => of.firstChild.textContent)"
        self.assertEqual(browser.value(names), ["Another", "Three"])
        browser.call("Page.reload")
        browser.wait_for("document.readyState === 'complete' && document.getElementById('conversations')?.children.length === 2")
        self.assertEqual(browser.value("document.getElementById('temperature').value"), "0.25")
        self.click(browser, "Three")
        self.assertEqual(browser.value(ANSWERS), [SHOWN])
        self.assertEqual(browser.value("document.getElementById('system').value"), "Be brief.")
        self.click(browser, "×", "document.querySelector('[aria-current]').parentElement")
        self.assertEqual(browser.value(names), ["Another"])
        self.assertEqual(browser.value(ANSWERS), [])
        self.click(browser, "Delete all")
        self.assertEqual(browser.value("Object.keys(localStorage).filter(key => key.startsWith('kvzap-conversation-'))"), [])
        self.click(browser, "Reset settings", "document")
        self.assertEqual(browser.value("document.getElementById('temperature').value"), "")
        self.assertEqual(browser.value("faults"), [])

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
        browser = self.open(*PRUNED)
        said = "document.querySelector('#messages').innerText"
        file = self.folder / "document.txt"
        file.write_text("Ünder\nthe sea\n")
        root = browser.call("DOM.getDocument")["root"]["nodeId"]
        node = browser.call("DOM.querySelector", nodeId=root, selector="#file")["nodeId"]
        browser.call("DOM.setFileInputFiles", nodeId=node, files=[str(file)])
        browser.wait_for("document.getElementById('document').value === 'Ünder\\nthe sea\\n'")
        for number, (stream, cut) in enumerate([(STREAM + LAST, 1), (STREAM + LAST, 5), (STREAM + LAST, 1 << 20),
                                                ((STREAM + LAST).replace("\n\n", "\r\n\r\n"), 3)], start=1):
            self.play(browser, stream, cut)
            note = self.ask(browser, f"Question {number}")
            self.assertEqual(browser.value(ANSWERS)[-1], SHOWN)
        self.assertEqual(note, "9 prompt tokens (4 cached), 7 new tokens; 25.0 % evicted: 750 B of 1.00 kB")
        self.assertEqual(browser.value("document.querySelectorAll('#messages img, #messages b').length"), 0)
        self.assertEqual(browser.value("document.title"), "kvzap")
        first, second = browser.value("asked.slice(0, 2)")
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
            browser.wait_for(f"!running && {said}.includes({json.dumps(error)})")
            self.assertEqual(browser.value(ANSWERS)[-1], SHOWN)
            self.assertIn("an error ended the answer", browser.value("[...document.querySelectorAll('.cut')].at(-1).textContent"))
        # Where nothing has come the message is there to be sent again.
        browser.value("window.fetch = () => Promise.reject(new TypeError('Failed to fetch'))")
        self.type(browser, "message", "And now?")
        self.enter(browser)
        browser.wait_for(f"{said}.includes('the server cannot be reached')")
        self.assertEqual(browser.value("document.getElementById('message').value"), "And now?")
        self.assertNotIn("And now?", browser.value(said))

    def test_hostile_answers(self):
        browser = self.open(*PRUNED)
        text = ("# <b>a</b>\n[x](javascript:window.ran=1) [y](https://example.org/) ![p](https://example.org/p.png)\n"
                "<script>window.ran=1</script><img src=x onerror=window.ran=1>\n```\n<svg onload=window.ran=1>\n```\n"
                "| <i>c</i> | d |\n|---|---|\n| <iframe src=x> | e |\n")
        chunk = json.dumps({"choices": [{"index": 0, "delta": {"reasoning_content": "<u>t</u>", "content": text}}]})
        self.play(browser, f"data: {chunk}\n\n{LAST}", 20)
        self.ask(browser, "<b>Me</b><script>window.ran=1</script>")
        inside = set(browser.value("[...document.querySelectorAll('#messages *')].map(of => of.tagName.toLowerCase())"))
        self.assertLessEqual(inside, {"article", "div", "button", "details", "summary", "p", "h3", "br", "a", "pre", "code", "table",
                                      "thead", "tbody", "tr", "th", "td"})
        links = browser.value("[...document.querySelectorAll('#messages a')].map(of => [of.href, of.rel, of.target])")
        self.assertEqual(links, [[address, "noopener noreferrer nofollow", "_blank"]
                                 for address in ("https://example.org/", "https://example.org/p.png")])
        self.assertIn("<script>window.ran=1</script>", browser.value("document.querySelector('.user .text').textContent"))
        # Should a script get into the page all the same, it does not run.
        browser.value("""document.body.append(Object.assign(document.createElement("script"), {textContent: "window.ran = 1"}));
            document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.ran = 1'><p style='color: red'>")""")
        browser.wait_for("faults.length >= 3")
        self.assertEqual({fault.split()[0] for fault in browser.value("faults")}, {"securitypolicyviolation"})
        self.assertIsNone(browser.value("window.ran"))

    def test_server_without_policy(self):
        browser = self.open()
        browser.wait_for("document.getElementById('model').textContent === 'recall-4m'")
        browser.value("localStorage.setItem('kvzap-settings', JSON.stringify({threshold: '-3'})); loadSettings()")
        self.assertTrue(browser.value("document.getElementById('pruning').hidden"))
        self.type(browser, "max-tokens", "4")
        browser.value("(window.real = window.fetch, window.fetch = (path, options) => (window.sent = options.body || window.sent, real(path, options)))")
        note = self.ask(browser, "Hello")
        self.assertRegex(note, r"new tokens; keys and values: [\d.]+ kB$")
        self.assertNotIn("kvzap", json.loads(browser.value("sent")))

    def test_running_sequence_and_stop(self):
        browser = self.open("--random-weights", "1", "-c", "1000000", *PRUNED)
        self.type(browser, "max-tokens", "900000")
        self.type(browser, "message", "Tell me")
        self.enter(browser)
        browser.wait_for("[...document.querySelectorAll('#sequences tr')]"
                         ".some(of => of.cells[1].textContent === 'decode' && Number(of.cells[3].textContent) > 10)")
        browser.value("document.getElementById('stop').click()")
        browser.wait_for("document.querySelector('.cut')?.textContent.startsWith('Stopped')")
        browser.wait_for("document.getElementById('counts').textContent === '0, 0'")
        # Escape does the same, and leaving the conversation.
        for leave in (lambda: self.press(browser, "Escape", 27)), (lambda: self.click(browser, "New conversation")):
            self.type(browser, "message", "More")
            self.enter(browser)
            browser.wait_for("document.getElementById('counts').textContent === '1, 0'")
            leave()
            browser.wait_for("document.getElementById('counts').textContent === '0, 0'")
        self.assertEqual(browser.value(ANSWERS), [])
        self.assertEqual(browser.value("store.list().length"), 1)

    def test_errors_and_key(self):
        key = self.folder / "key"
        key.write_text("secret-1\n")
        key.chmod(0o600)
        browser = self.open("--api-key-file", key, *PRUNED)
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
