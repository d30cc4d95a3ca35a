# Sends requests to a server that speaks OpenAI's protocol, and measures what comes back when.
import collections
import http.client
import json
import random
import string
import threading
import time
import urllib.parse


def words(draw, count):
    """Made-up words of so many characters, blanks included."""
    parts, left = [], count
    while left > 0:
        length = min(left, draw.randrange(3, 10))
        parts.append("".join(draw.choices(string.ascii_lowercase, k=length)))
        left -= length + 1
    return " ".join(parts).ljust(count)


def ids(draw, count, vocabulary):
    return [draw.randrange(vocabulary) for _ in range(count)]


class Prompts:
    """The requests of a load, each a function of the seed and its number."""

    def __init__(self, *, seed=1, prompt_tokens=512, document_tokens=0, new_tokens=64, vocabulary=1000, chat=False,
                 as_text=False, texts=None, model=None, fields=None):
        self.seed, self.prompt_tokens, self.document_tokens = seed, prompt_tokens, document_tokens
        self.new_tokens, self.vocabulary, self.chat, self.texts = new_tokens, vocabulary, chat, texts
        self.is_text = chat or as_text or texts is not None
        self.path = "/v1/chat/completions" if chat else "/v1/completions"
        self.fields = {"max_tokens": new_tokens, "ignore_eos": True, "temperature": 0, **(fields or {})}
        if model:
            self.fields["model"] = model

    def piece(self, name, count):
        """Of so many tokens; the same whenever it is asked for."""
        draw = random.Random(f"{self.seed} {name}")
        return words(draw, count) if self.is_text else ids(draw, count, self.vocabulary)

    def body(self, number, document=0):
        """Request `number`; what documents have in common comes first."""
        if self.texts is not None:
            question = self.texts[number % len(self.texts)]
        else:
            question = self.piece(f"question {number}", self.prompt_tokens)
        first = self.piece(f"document {document}", self.document_tokens) if self.document_tokens else None
        body = {**self.fields, "stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            content = question
            if first is not None:
                content = [{"type": "text", "text": text} for text in (first, question)]
            body["messages"] = [{"role": "user", "content": content}]
        else:
            body["prompt"] = question if first is None else first + question
        return body


def read_texts(path):
    """Prompts of a JSONL file: lines are texts, or objects with a context and a question, a prompt or a text."""
    texts = []
    for line in path.read_text().splitlines():
        if not line.strip():
            continue
        row = json.loads(line)
        if isinstance(row, dict):
            if "context" in row:
                row = row["context"] + row.get("question", "")
            else:
                row = row.get("prompt", row.get("text"))
        if not isinstance(row, str):
            raise SystemExit(f"{path}: a line has neither a text, nor context, prompt or text")
        texts.append(row)
    if not texts:
        raise SystemExit(f"{path}: no prompts")
    return texts


class Target:
    """A server at an address, as http://127.0.0.1:8080."""

    def __init__(self, url, key=None, timeout=600):
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        self.host, self.port = parts.hostname, parts.port or 80
        self.base = parts.path.rstrip("/").removesuffix("/v1")
        self.key, self.timeout = key, timeout

    def connect(self):
        return http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)

    def headers(self):
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def get(self, path):
        """The text at a path; None if there is none."""
        connection = self.connect()
        try:
            connection.request("GET", self.base + path, headers=self.headers())
            response = connection.getresponse()
            text = response.read().decode()
            return text if response.status == 200 else None
        finally:
            connection.close()

    def status(self):
        """/kvzap/status, if there is such a thing."""
        text = self.get("/kvzap/status")
        return json.loads(text) if text else None

    def metrics(self):
        """{name: value} of /metrics, sums over labels."""
        values = collections.Counter()
        for line in (self.get("/metrics") or "").splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                values[name.split("{")[0]] += float(value)
        return values

    def model(self):
        """The name of the model that is served, or None."""
        text = self.get("/v1/models")
        models = json.loads(text).get("data", []) if text else []
        return models[0]["id"] if models else None


class Reply:
    """What came of one request. Times are of time.perf_counter."""

    def __init__(self):
        self.outcome = ""  # "200", another status, or what happened in its place
        self.begin = self.end = time.perf_counter()
        self.events = []  # (time, parsed event)
        self.arrivals = []  # when text came
        self.prompt_tokens = self.cached_tokens = self.new_tokens = None
        self.kvzap = {}
        self.retry_after = 0.0

    @property
    def is_good(self):
        return self.outcome == "200"

    def read(self):
        """Makes of the events what the other fields have."""
        roles = []
        for when, event in self.events:
            if "error" in event:
                self.outcome = "error in a stream"
            for choice in event.get("choices", []):
                text = choice.get("text") or (choice.get("delta") or {}).get("content")
                if text:
                    self.arrivals.append(when)
                elif not choice.get("finish_reason"):
                    roles.append(when)
                self.kvzap = choice.get("kvzap") or self.kvzap
            usage = event.get("usage")
            if usage:
                self.prompt_tokens = usage.get("prompt_tokens")
                self.new_tokens = usage.get("completion_tokens")
                self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            self.kvzap = event.get("kvzap") or self.kvzap
        self.arrivals = self.arrivals or roles
        if self.new_tokens is None:
            self.new_tokens = len(self.arrivals)
        self.events = []

    @property
    def first_token(self):
        return self.arrivals[0] - self.begin if self.arrivals else None

    @property
    def gaps(self):
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:])]


def ask(target, path, body):
    """Sends one request, and reads its stream to the end."""
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **target.headers()}
    reply = Reply()
    connection = target.connect()
    try:
        connection.request("POST", target.base + path, data, headers)
        response = connection.getresponse()
        reply.outcome = str(response.status)
        if response.status != 200:
            response.read()
            reply.retry_after = float(response.headers.get("Retry-After") or 0)
            return reply
        is_done = False
        for line in iter(response.readline, b""):
            if not line.startswith(b"data:"):
                continue
            now = time.perf_counter()
            text = line[5:].strip()
            if text == b"[DONE]":
                is_done = True
                break
            reply.events.append((now, json.loads(text)))
        if not is_done:
            reply.outcome = "cut off"
    except (OSError, http.client.HTTPException, ValueError) as error:
        reply.outcome = type(error).__name__
    finally:
        reply.end = time.perf_counter()
        connection.close()
        reply.read()
    return reply


class Watch:
    """Looks at /kvzap/status while a load runs, and keeps the largest that it sees."""

    def __init__(self, target, every=0.1):
        self.target, self.every = target, every
        self.most = {}
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def look(self):
        while True:
            try:
                status = self.target.status()
            except (OSError, http.client.HTTPException, ValueError):
                status = None
            if status is None:
                return
            for key in ("running", "waiting", "prefixes", "kv_allocated"):
                self.most[key] = max(self.most.get(key, 0), status.get(key) or 0)
            if self.ends.wait(self.every):
                return

    def __exit__(self, *_):
        self.ends.set()
        self.thread.join()


def quantile(values, q):
    """The smallest value that at least a share q of them does not exceed; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, max(0, -int(-q * len(ordered) // 1) - 1))]


def summary(values):
    values = list(values)
    return {"p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "n": len(values)}


def mean(values):
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def closed_loop(target, make, clients, requests, seconds):
    """Each client sends its next request when the last one has been answered. Returns the replies."""
    replies, lock = [], threading.Lock()
    numbers = iter(range(requests))
    deadline = time.perf_counter() + seconds

    def client():
        while True:
            with lock:
                number = next(numbers, None)
            if number is None or time.perf_counter() > deadline:
                return
            reply = ask(target, *make(number))
            with lock:
                replies.append(reply)
            if not reply.is_good:
                time.sleep(min(max(reply.retry_after, 0.05), 1))

    threads = [threading.Thread(target=client, daemon=True) for _ in range(min(clients, requests))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replies


def open_loop(target, make, rate, requests, seconds, seed=1):
    """Requests come at their own times, so many a second on average (Poisson), answered or not."""
    replies, lock, threads = [], threading.Lock(), []
    draw = random.Random(f"{seed} arrivals")
    begin = time.perf_counter()
    at = begin

    def one(number):
        reply = ask(target, *make(number))
        with lock:
            replies.append(reply)

    for number in range(requests):
        at += draw.expovariate(rate)
        if at > begin + seconds:
            break
        time.sleep(max(0, at - time.perf_counter()))
        threads.append(threading.Thread(target=one, args=(number,), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return replies


def figures(replies, most=None):
    """What tables and JSON have of a load."""
    good = [reply for reply in replies if reply.is_good]
    begin = min((reply.begin for reply in replies), default=0)
    took = max((reply.end for reply in replies), default=0) - begin
    tokens = sum(reply.new_tokens for reply in good)
    return {
        "requests": len(replies),
        "seconds": took,
        "tokens_per_second": tokens / took if took else 0.0,
        "requests_per_second": len(good) / took if took else 0.0,
        "first_token": summary(reply.first_token for reply in good if reply.arrivals),
        "between_tokens": summary(gap for reply in good for gap in reply.gaps),
        "prompt_tokens": mean(reply.prompt_tokens for reply in good),
        "cached_tokens": mean(reply.cached_tokens for reply in good),
        "new_tokens": mean(reply.new_tokens for reply in good),
        "outcomes": dict(sorted(collections.Counter(reply.outcome for reply in replies).items())),
        "evict_ratio": mean(reply.kvzap.get("evict_ratio") for reply in good),
        "kv_bytes": mean(reply.kvzap.get("kv_bytes") for reply in good),
        "full_kv_bytes": mean(reply.kvzap.get("full_kv_bytes") for reply in good),
        "most": most or {},
    }


def measure(target, make, *, clients=None, rate=None, requests, seconds, seed=1):
    """One load; `make(number)` gives a request's path and body."""
    before = target.metrics()
    with Watch(target) as watch:
        if rate:
            replies = open_loop(target, make, rate, requests, seconds, seed)
        else:
            replies = closed_loop(target, make, clients, requests, seconds)
    after = target.metrics()
    preempted = after["kvzap_preemptions_total"] - before["kvzap_preemptions_total"] if after else None
    kind = {"rate": rate} if rate else {"clients": clients}
    return {**kind, **figures(replies, watch.most), "preempted": preempted}
