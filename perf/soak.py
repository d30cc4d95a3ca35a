# Mixed traffic for a long time: whether a server's memory, descriptors and threads stay the same.
import http.client
import json
import os
import pathlib
import random
import threading
import time

import load

# The demo model's template knows no tools.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>\n'
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT, PLAIN, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
KINDS = ["chat", "document", "cut", "tools", "schema", "grammar", "long", "echo", "several", "responses", "messages", "wrong", "idle"]


def with_tools(config, work):
    """A folder with the files of `config` and a chat template with tools."""
    folder = work / f"{config.name}-tools"
    folder.mkdir(parents=True, exist_ok=True)
    for file in config.iterdir():
        if file.name != "chat_template.jinja" and not (folder / file.name).exists():
            os.symlink(file.resolve(), folder / file.name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def chat(text, **fields):
    return {"messages": [{"role": "user", "content": text}], **fields}


class Traffic:
    """Requests of one client, each a function of the seed, the client and its number."""

    def __init__(self, target, seed, client, new_tokens, prompt_tokens):
        self.target, self.draw = target, random.Random(f"{seed} {client}")
        self.new_tokens, self.prompt_tokens, self.response = new_tokens, prompt_tokens, None

    def schema(self):
        """One of a million, so that compiled ones are dropped."""
        names = [f"key{self.draw.randrange(1000)}" for _ in range(3)]
        kinds = [{"type": "integer", "maximum": self.draw.randrange(1000)}, {"type": "string", "maxLength": 9}, {"enum": names}]
        return {"type": "object", "properties": {name: self.draw.choice(kinds) for name in names}, "required": names[:2]}

    def request(self, kind):
        """The path and the body of a request."""
        draw, fields = self.draw, {"max_tokens": self.draw.randrange(1, self.new_tokens), "temperature": 1}
        words = load.words(draw, draw.choice([20, 100, 400]))
        if kind == "document":
            document = load.words(random.Random(draw.randrange(40)), self.prompt_tokens)
            content = [{"type": "text", "text": text} for text in (document, words)]
            return CHAT, chat(content, **fields)
        if kind == "tools":
            tools = [{"type": "function", "function": {"name": f"tool{i}", "parameters": self.schema()}} for i in range(3)]
            return CHAT, chat(words, **fields, tools=tools, tool_choice=draw.choice(["auto", "required"]))
        if kind == "schema":
            format = {"type": "json_schema", "json_schema": {"name": "x", "schema": self.schema()}}
            return CHAT, chat(words, **fields, response_format=format)
        if kind == "grammar":
            return CHAT, chat(words, **fields, grammar=f'root ::= [a-z]{{1,{draw.randrange(1, 50)}}} ("," root)?')
        if kind == "long":
            return PLAIN, {"prompt": load.words(draw, self.prompt_tokens), **fields}
        if kind == "echo":
            return PLAIN, {"prompt": words, **fields, "echo": True, "logprobs": 3}
        if kind == "several":
            return CHAT, chat(words, **fields, n=3, logprobs=True, top_logprobs=2)
        if kind == "responses":
            body = {"input": words, "max_output_tokens": fields["max_tokens"]}
            return RESPONSES, {**body, "previous_response_id": self.response} if draw.random() < 0.7 else body
        if kind == "messages":
            return MESSAGES, chat(words, max_tokens=fields["max_tokens"], system="Be brief.")
        if kind == "wrong":
            return draw.choice([(CHAT, chat(words, max_tokens=-5)), ("/none", {}), (CHAT, {"messages": 5}),
                                (CHAT, chat(words, response_format={"type": "xml"})), (PLAIN, {"prompt": "a" * 300000})])
        return CHAT, chat(words, **fields)

    def one(self):
        """Sends a request. Returns its kind and what came of it."""
        kind = self.draw.choice(KINDS)
        path, body = self.request(kind)
        if self.draw.random() < 0.5 or kind == "cut":
            body = {**body, "stream": True}
        connection = self.target.connect()
        try:
            if kind == "idle":
                connection.connect()
                time.sleep(self.draw.random())
                return kind, "200"
            connection.request("POST", self.target.base + path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if kind == "cut":
                for _ in range(self.draw.randrange(1, 12)):
                    response.readline()
                return kind, str(response.status)
            data = response.read()
            if kind == "responses" and response.status == 200 and not body.get("stream"):
                self.response = json.loads(data)["id"]
            if kind == "responses" and response.status == 400:
                self.response = None  # the conversation has filled the context
            return kind, str(response.status)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return kind, type(error).__name__
        finally:
            connection.close()


class Pause:
    """Lets clients wait between requests until all of them do."""

    def __init__(self, clients):
        self.changed, self.clients = threading.Condition(), clients
        self.is_on, self.waiting = False, 0

    def pass_by(self):
        with self.changed:
            self.waiting += 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.is_on)
            self.waiting -= 1

    def begin(self):
        with self.changed:
            self.is_on = True
            self.changed.wait_for(lambda: self.waiting == self.clients)

    def end(self):
        with self.changed:
            self.is_on = False
            self.changed.notify_all()


def look(target, pid):
    """What the idle server holds."""
    while True:
        status = target.status()
        if status["running"] == status["waiting"] == 0:
            break
        time.sleep(0.1)
    time.sleep(1)  # connections of clients that left are closed, states written
    threads = len(list(pathlib.Path(f"/proc/{pid}/task").iterdir()))
    metrics = target.metrics()
    return {"resident": metrics["process_resident_memory_bytes"], "descriptors": int(metrics["process_open_fds"]), "threads": threads,
            "allocated": metrics["kvzap_kv_allocated_bytes"], "prefixes": int(metrics["kvzap_prefixes"]),
            "stored": int(metrics["kvzap_stored_prefixes"])}


def run(target, pid, options, show):
    """Traffic for options.seconds. Returns a row for each minute and the numbers of outcomes by kind."""
    clients = max(options.clients)
    pause, ends, lock = Pause(clients), threading.Event(), threading.Lock()
    outcomes, begin = {}, time.monotonic()

    def client(number):
        traffic = Traffic(target, options.seed, number, options.new_tokens, options.prompt_tokens)
        while not ends.is_set():
            pause.pass_by()
            kind, outcome = traffic.one()
            with lock:
                outcomes.setdefault(kind, {}).setdefault(outcome, 0)
                outcomes[kind][outcome] += 1
            time.sleep(traffic.draw.expovariate(1 / options.think_seconds) if options.think_seconds else 0)

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    rows = []
    while time.monotonic() < begin + options.seconds:
        time.sleep(min(60, options.seconds))
        pause.begin()
        with lock:
            requests = sum(sum(one.values()) for one in outcomes.values())
        rows.append({"minute": (time.monotonic() - begin) / 60, "requests": requests, **look(target, pid)})
        show(rows[-1])
        pause.end()
    ends.set()
    for thread in threads:
        thread.join()
    return rows, outcomes


def growth(rows):
    """What the last row has more than the one nearest to minute 5."""
    first = min(rows, key=lambda row: abs(row["minute"] - 5))
    return {name: rows[-1][name] - first[name] for name in ("resident", "descriptors", "threads")}
