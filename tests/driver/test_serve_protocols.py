"""Anthropic's /v1/messages and OpenAI's /v1/responses from outside: whole replies, streams, tools, errors, stored responses."""
import json
import os
import pathlib
import shutil
import tempfile

from harness import CASES, MODEL
from test_serve import CHAT, PRUNED, Server, ServerTest, SharedServerTest, text_of

CASE = CASES[0]
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
DOCUMENT = [{"type": "text", "text": CASE["context"]}, {"type": "text", "text": CASE["question"]}]
ASK = {"max_tokens": 24, "temperature": 0, "messages": [{"role": "user", "content": DOCUMENT}]}
ASK_INPUT = {"max_output_tokens": 24, "temperature": 0,
             "input": [{"role": "user", "content": [{**part, "type": "input_text"} for part in DOCUMENT]}]}
CALL = '<think>Hm.</think>Let me see. <tool_call>{"name": "now", "arguments": {"zone": "UTC"}}</tool_call>'
# Answers with the token whose text is CALL.
CALLING = {"logit_bias": {"1021": 100}, "temperature": 0}
PARAMETERS = {"type": "object", "properties": {"zone": {"type": "string"}}}


def named_events(response):
    """Name and data of each event of a stream."""
    name = None
    for line in iter(response.readline, b""):
        line = line.rstrip(b"\r\n").decode()
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])
        elif line and not line.startswith(":"):
            raise AssertionError(f"no event: {line!r}")


def stream(server, path, body):
    """Events of a stream, whose names are those of their types."""
    connection, response = server.open_stream(path, body)
    try:
        events = list(named_events(response))
    finally:
        connection.close()
    assert all(name == event["type"] for name, event in events), events
    return [event for _, event in events]


def types_of(events):
    """Types of events; repeated ones once."""
    types = [event["type"] for event in events]
    return [one for i, one in enumerate(types) if i == 0 or types[i - 1] != one]


def model_with_tools(folder, thinks=True):
    """The demo model with a chat template for tools, also for thoughts, and a token whose text is CALL."""
    folder = pathlib.Path(folder) / "recall-4m"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        os.symlink(MODEL / name, folder / name)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1023}))
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    (end,) = [token for token in tokenizer["added_tokens"] if token["id"] == 1021]
    end.update(content=CALL, special=False)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((MODEL / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(
        "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
        "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no such message') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
        "{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        + "{% if enable_thinking %}<think>{% endif %}" * thinks + "{% endif %}")
    return folder


class ToolsTest(SharedServerTest):
    """On a model that calls a tool when it is told to."""

    THINKS = True

    @classmethod
    def setUpClass(cls):
        folder = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, folder)
        cls.server = Server("--dtype", "f32", model=model_with_tools(folder, cls.THINKS))


class Messages(SharedServerTest):
    def check_refused(self, reply, status, kind, words):
        code, headers, body = reply
        self.assertEqual(code, status, body)
        self.assertTrue(headers["Content-Type"].startswith("application/json"), headers)
        error = json.loads(body)
        self.assertEqual((set(error), error["type"]), ({"type", "error"}, "error"))
        self.assertEqual((set(error["error"]), error["error"]["type"]), ({"type", "message"}, kind))
        self.assertIn(words, error["error"]["message"])

    def ask(self, **fields):
        return self.server.post(MESSAGES, {**ASK, **fields}, {"x-api-key": "none", "anthropic-version": "2023-06-01"})

    def test_whole(self):
        reply = self.ask(model="recall-4m")
        self.assertRegex(reply["id"], r"^msg_\d+$")
        self.assertEqual((reply["type"], reply["role"], reply["model"]), ("message", "assistant", "recall-4m"))
        self.assertEqual(reply["content"], [{"type": "text", "text": CASE["expected"]}])
        self.assertEqual((reply["stop_reason"], reply["stop_sequence"]), ("end_turn", None))
        chat = self.server.post(CHAT, {"messages": ASK["messages"], "temperature": 0, "max_tokens": 24})
        self.assertEqual(text_of(chat), CASE["expected"])
        again = self.ask()
        usage = again["usage"]
        self.assertGreater(usage["cache_read_input_tokens"], 0)
        self.assertEqual(usage["input_tokens"] + usage["cache_read_input_tokens"], chat["usage"]["prompt_tokens"])
        self.assertEqual((usage["output_tokens"], usage["cache_creation_input_tokens"]),
                         (chat["usage"]["completion_tokens"], 0))
        self.assertEqual(again["kvzap"], chat["kvzap"])

    def test_ends(self):
        self.assertEqual(self.ask(max_tokens=3)["stop_reason"], "max_tokens")
        word = CASE["expected"].split()[3]
        cut = self.ask(stop_sequences=["zzz", word])
        self.assertEqual((cut["stop_reason"], cut["stop_sequence"]), ("stop_sequence", word))
        self.assertEqual(cut["content"][0]["text"], CASE["expected"].split(word)[0])
        first = CASE["expected"].split()[0]
        self.assertEqual(self.ask(stop_sequences=[first])["content"], [])

    def test_stream(self):
        events = stream(self.server, MESSAGES, ASK)
        self.assertEqual(types_of(events), ["message_start", "content_block_start", "content_block_delta",
                                            "content_block_stop", "message_delta", "message_stop"])
        start = events[0]["message"]
        self.assertEqual((start["content"], start["stop_reason"], start["role"]), ([], None, "assistant"))
        self.assertGreater(start["usage"]["input_tokens"], 300)
        self.assertEqual(events[1], {"type": "content_block_start", "index": 0,
                                     "content_block": {"type": "text", "text": ""}})
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        self.assertEqual({delta["type"] for delta in deltas}, {"text_delta"})
        self.assertEqual("".join(delta["text"] for delta in deltas), CASE["expected"])
        self.assertEqual(events[-2]["delta"], {"stop_reason": "end_turn", "stop_sequence": None})
        self.assertEqual(events[-2]["usage"]["output_tokens"], len(deltas) + 1)
        self.assertGreater(events[-2]["kvzap"]["evict_ratio"], 0)

    def test_system_and_turns(self):
        turns = [{"role": "user", "content": DOCUMENT}, {"role": "assistant", "content": CASE["expected"]},
                 {"role": "user", "content": "And now?"}]
        for system in ("Be brief.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]):
            reply = self.ask(system=system, messages=turns, max_tokens=4)
            chat = self.server.post(CHAT, {"messages": [{"role": "system", "content": "Be brief."}, *turns],
                                           "temperature": 0, "max_tokens": 4})
            self.assertEqual(reply["content"][0]["text"], text_of(chat))
        begun = [{"role": "user", "content": DOCUMENT}, {"role": "assistant", "content": CASE["expected"][:11]}]
        self.assertEqual(self.ask(messages=begun)["content"][0]["text"], CASE["expected"][11:])

    def test_count_tokens(self):
        count = self.server.post(f"{MESSAGES}/count_tokens", {"messages": ASK["messages"], "model": "recall-4m"})
        usage = self.ask()["usage"]
        self.assertEqual(count, {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]})
        self.check_refused(self.server.request("POST", f"{MESSAGES}/count_tokens", {}), 400, "invalid_request_error",
                           "messages are missing")

    def test_errors(self):
        image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
        tool = {"name": "now", "input_schema": PARAMETERS}
        for fields, words in (
                ({"messages": []}, "messages"), ({"messages": image}, "messages[0].content[0] has the type 'image'"),
                ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
                ({"messages": [{"role": "user"}]}, "messages[0].content is null"),
                ({"max_tokens": 0}, "max_tokens"), ({"temperature": "x"}, "temperature"), ({"top_k": 0.5}, "top_k"),
                ({"stop_sequences": [1]}, "stop_sequences"), ({"stop_sequences": 5}, "stop_sequences is 5"),
                ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
                ({"tools": [{"name": "now"}]}, "tools[0].input_schema"),
                ({"tools": [tool]}, "not supported by the model's chat template"),
                ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
                ({"tool_choice": {"type": "tool", "name": "now"}}, "tool_choice.name is 'now'"),
                ({"tool_choice": {"type": "auto", "name": {}}}, "tool_choice.name"),
                ({"tool_choice": {"type": "some"}}, "tool_choice.type"), ({"thinking": {"type": "x"}}, "thinking.type"),
                ({"output_config": {"format": {"type": "xml"}}}, "output_config.format is"),
                ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format is"),
                ({"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported"),
                ({"messages": [{"role": "user", "content": "word " * 5000}]}, "4096")):
            with self.subTest(fields=str(fields)[:80]):
                self.check_refused(self.server.request("POST", MESSAGES, {**ASK, **fields}), 400,
                                   "invalid_request_error", words)
        self.check_refused(self.server.request("POST", MESSAGES, {**ASK, "model": "x"}), 404, "not_found_error",
                           "expected 'recall-4m'")
        self.check_refused(self.server.request("GET", MESSAGES), 405, "invalid_request_error", "expected POST")
        self.check_refused(self.server.request("POST", f"{MESSAGES}/batches", {}), 404, "not_found_error", "unknown path")
        self.check_refused(self.server.request("POST", MESSAGES, b"{"), 400, "invalid_request_error", "not valid JSON")

    def test_keys(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "keys"
            file.write_text("secret-1\n")
            file.chmod(0o600)
            server = self.start(*PRUNED, "--api-key-file", file)
        for key, status in (("secret-1", 200), ("secret-2", 401), ("", 401)):
            reply = server.request("POST", MESSAGES, {**ASK, "max_tokens": 1}, {"x-api-key": key} if key else {})
            if status == 200:
                self.assertEqual(reply[0], 200, reply)
            else:
                self.check_refused(reply, 401, "authentication_error", "x-api-key")
        self.assertEqual(server.request("GET", "/v1/models", headers={"x-api-key": "secret-1"})[0], 200)
        wrong = {"x-api-key": "secret-1", "Authorization": "Bearer x"}
        self.assertEqual(server.request("GET", "/v1/models", headers=wrong)[0], 401)
        self.stop(server)


class MessagesTools(ToolsTest):
    TOOLS = [{"name": "now", "description": "The time", "input_schema": PARAMETERS}]
    ASK = {"max_tokens": 1, "tools": TOOLS, "messages": [{"role": "user", "content": "Time?"}], **CALLING}

    def test_round_trip(self):
        reply = self.server.post(MESSAGES, {**self.ASK, "tool_choice": {"type": "auto"}})
        thinking, text, call = reply["content"]
        self.assertEqual((thinking["type"], thinking["thinking"]), ("thinking", "Hm."))
        self.assertEqual(text, {"type": "text", "text": "Let me see."})
        self.assertEqual((call["type"], call["name"], call["input"]), ("tool_use", "now", {"zone": "UTC"}))
        self.assertEqual(reply["stop_reason"], "tool_use")
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "5"}]}
        turns = [*self.ASK["messages"], {"role": "assistant", "content": reply["content"]},
                 {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]}]
        second = self.server.post(MESSAGES, {**self.ASK, "messages": turns, "tool_choice": {"type": "none"}})
        self.assertEqual([block["type"] for block in second["content"]], ["thinking", "text"])
        chat = [*self.ASK["messages"],
                {"role": "assistant", "content": "Let me see.", "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}]},
                {"role": "tool", "tool_call_id": "1", "content": "5"}, {"role": "user", "content": "Well?"}]
        same = self.server.post(CHAT, {"messages": chat, "max_tokens": 1, "temperature": 0})
        usage = second["usage"]
        self.assertEqual(usage["input_tokens"] + usage["cache_read_input_tokens"], same["usage"]["prompt_tokens"])

    def test_stream(self):
        events = stream(self.server, MESSAGES, self.ASK)
        self.assertEqual(types_of(events), [
            "message_start", *3 * ["content_block_start", "content_block_delta", "content_block_stop"],
            "message_delta", "message_stop"])
        deltas = [event for event in events if event["type"] == "content_block_delta"]
        self.assertEqual([(event["index"], event["delta"]["type"]) for event in deltas],
                         [(0, "thinking_delta"), (1, "text_delta"), (2, "input_json_delta")])
        self.assertEqual(json.loads(deltas[2]["delta"]["partial_json"]), {"zone": "UTC"})
        (started,) = [event["content_block"] for event in events if event.get("index") == 2
                      and event["type"] == "content_block_start"]
        self.assertEqual((started["type"], started["name"], started["input"]), ("tool_use", "now", {}))
        self.assertEqual(events[-2]["delta"]["stop_reason"], "tool_use")

    def test_thinking(self):
        counts = [self.server.post(f"{MESSAGES}/count_tokens", {"messages": self.ASK["messages"], "thinking": thinking})
                  ["input_tokens"] for thinking in ({"type": "disabled"}, {"type": "enabled", "budget_tokens": 9})]
        self.assertLess(*counts)

    def test_template_errors(self):
        messages = [{"role": "user", "content": "refuse"}]
        error = self.check_error(self.server.request("POST", CHAT, {"messages": messages}), 400, "messages")
        self.assertIn("no such message", error["message"])
        self.check_error(self.server.request("POST", RESPONSES, {"input": "refuse"}), 400, "input")
        status, _, body = self.server.request("POST", MESSAGES, {**ASK, "messages": messages})
        self.assertEqual((status, json.loads(body)["error"]["type"]), (400, "invalid_request_error"))
        tools = [{"type": "function", "function": {"name": "now", "parameters": PARAMETERS}}]
        self.check_error(self.server.request("POST", CHAT, {"messages": messages, "tools": tools}), 400, "messages")


class Responses(SharedServerTest):
    def ask(self, **fields):
        return self.server.post(RESPONSES, {**ASK_INPUT, **fields})

    def text(self, response):
        (item,) = response["output"]
        (part,) = item["content"]
        self.assertEqual((item["type"], item["role"], part["type"], part["annotations"]),
                         ("message", "assistant", "output_text", []))
        return part["text"]

    def test_whole(self):
        reply = self.ask(model="recall-4m", metadata={"a": "b"}, store=False)
        self.assertRegex(reply["id"], r"^resp_\d+_[0-9a-f]{32}$")
        self.assertEqual((reply["object"], reply["status"], reply["model"]), ("response", "completed", "recall-4m"))
        self.assertEqual((reply["error"], reply["incomplete_details"], reply["metadata"], reply["store"]),
                         (None, None, {"a": "b"}, False))
        self.assertEqual(self.text(reply), CASE["expected"])
        self.assertEqual(reply["output"][0]["status"], "completed")
        usage = reply["usage"]
        self.assertEqual(usage["total_tokens"], usage["input_tokens"] + usage["output_tokens"])
        self.assertGreater(self.ask()["usage"]["input_tokens_details"]["cached_tokens"], 0)
        short = self.ask(max_output_tokens=3)
        self.assertEqual((short["status"], short["incomplete_details"]),
                         ("incomplete", {"reason": "max_output_tokens"}))
        self.assertGreater(reply["kvzap"]["evict_ratio"], 0)

    def test_stream(self):
        events = stream(self.server, RESPONSES, ASK_INPUT)
        self.assertEqual([event["sequence_number"] for event in events], list(range(len(events))))
        self.assertEqual(types_of(events), [f"response.{name}" for name in (
            "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
            "output_text.done", "content_part.done", "output_item.done", "completed")])
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        self.assertEqual("".join(deltas), CASE["expected"])
        last = events[-1]["response"]
        self.assertEqual(self.text(last), CASE["expected"])
        self.assertEqual(events[-2]["item"], last["output"][0])
        self.assertEqual({event["item_id"] for event in events if "item_id" in event}, {last["output"][0]["id"]})
        self.assertEqual(self.server.get(f"{RESPONSES}/{last['id']}"), last)
        cut = stream(self.server, RESPONSES, {**ASK_INPUT, "max_output_tokens": 2})
        self.assertEqual(cut[-1]["type"], "response.incomplete")

    def test_formats(self):
        schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
        reply = self.ask(text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}})
        self.assertIn(json.loads(self.text(reply)), [{"n": 1}, {"n": 2}])
        output = {"format": {"type": "json_schema", "schema": schema}}
        reply = self.server.post(MESSAGES, {**ASK, "output_config": output})
        self.assertIn(json.loads(reply["content"][0]["text"]), [{"n": 1}, {"n": 2}])

    def test_stored(self):
        first = self.ask(instructions="Be brief.")
        path = f"{RESPONSES}/{first['id']}"
        self.assertEqual(self.server.get(path), first)
        second = self.server.post(RESPONSES, {"input": "And now?", "previous_response_id": first["id"],
                                              "max_output_tokens": 4, "temperature": 0})
        self.assertEqual(second["previous_response_id"], first["id"])
        turns = [{"role": "user", "content": DOCUMENT}, {"role": "assistant", "content": CASE["expected"]},
                 {"role": "user", "content": "And now?"}]
        chat = self.server.post(CHAT, {"messages": turns, "max_tokens": 4, "temperature": 0})
        self.assertEqual(self.text(second), text_of(chat))
        self.assertEqual(second["usage"]["input_tokens"], chat["usage"]["prompt_tokens"])
        self.assertEqual(self.server.request("DELETE", path)[0], 200)
        for method in ("GET", "DELETE"):
            self.check_error(self.server.request(method, path), 404)
        error = self.check_error(self.server.request("POST", RESPONSES, {**ASK_INPUT, "previous_response_id": first["id"]}),
                                 400, "previous_response_id")
        self.assertEqual(error["code"], "previous_response_not_found")
        # The later one has the whole conversation.
        third = self.server.post(RESPONSES, {"input": "And now?", "previous_response_id": second["id"],
                                             "max_output_tokens": 4})
        self.assertGreater(third["usage"]["input_tokens"], second["usage"]["input_tokens"])
        unstored = self.ask(store=False)
        self.check_error(self.server.request("GET", f"{RESPONSES}/{unstored['id']}"), 404)
        self.check_error(self.server.request("PUT", path), 405)

    def test_bounds_of_the_store(self):
        server = self.start(*PRUNED, "--response-memory", "20k")
        ids = [server.post(RESPONSES, {**ASK_INPUT, "max_output_tokens": 1})["id"] for _ in range(9)]
        there = [server.request("GET", f"{RESPONSES}/{one}")[0] == 200 for one in ids]
        self.assertTrue(there[-1])
        self.assertFalse(there[0])
        self.assertEqual(there, sorted(there))
        self.stop(server)
        server = self.start(*PRUNED, "--response-memory", "0")
        reply = server.post(RESPONSES, {**ASK_INPUT, "max_output_tokens": 1})
        self.assertEqual(server.request("GET", f"{RESPONSES}/{reply['id']}")[0], 404)
        self.stop(server)

    def test_errors(self):
        for fields, param, words in (
                ({"input": None}, "input", "missing"), ({"input": 5}, "input", "is 5"),
                ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "item_reference"),
                ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content", "input_image"),
                ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
                ({"tools": [{"type": "web_search"}]}, "tools[0].type 'web_search'", "not supported"),
                ({"tool_choice": "required"}, "tool_choice", "needs tools"),
                ({"tool_choice": {"type": "function", "name": "now"}}, "tool_choice.name", "tool_choice.name is 'now'"),
                ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type is 'xml'"),
                ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema"),
                ({"background": True}, "background", "not supported"), ({"truncation": "auto"}, "truncation", "supported"),
                ({"conversation": "x"}, "conversation", "not supported"),
                ({"include": ["message.output_text.logprobs"]}, "include", "not supported"),
                ({"previous_response_id": "resp_1"}, "previous_response_id", "stored"),
                ({"temperature": -1}, "temperature", "0 to 100")):
            with self.subTest(fields=str(fields)[:80]):
                error = self.check_error(self.server.request("POST", RESPONSES, {**ASK_INPUT, **fields}), 400, param)
                self.assertIn(words, error["message"])
        error = self.check_error(self.server.request("POST", RESPONSES, {**ASK_INPUT, "model": "x"}), 404, "model")
        self.assertEqual(error["code"], "model_not_found")
        error = self.check_error(self.server.request("POST", RESPONSES, {"input": "word " * 5000}), 400, "input")
        self.assertEqual(error["code"], "context_length_exceeded")
        for path, body in (("/tokenize", {"content": "x"}), ("/detokenize", {"tokens": [5]})):
            error = self.check_error(self.server.request("POST", path, {**body, "model": "x"}), 404, "model")
            self.assertEqual(error["code"], "model_not_found")


class ResponsesTools(ToolsTest):
    TOOLS = [{"type": "function", "name": "now", "description": "The time", "parameters": PARAMETERS, "strict": None}]
    ASK = {"max_output_tokens": 1, "tools": TOOLS, "input": "Time?", **CALLING}

    def test_round_trip(self):
        first = self.server.post(RESPONSES, self.ASK)
        self.assertEqual([item["type"] for item in first["output"]], ["reasoning", "message", "function_call"])
        thoughts, text, call = first["output"]
        self.assertEqual(thoughts["content"], [{"type": "reasoning_text", "text": "Hm."}])
        self.assertEqual((call["name"], json.loads(call["arguments"])), ("now", {"zone": "UTC"}))
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
        # The client sends all items back, or names the response.
        whole = self.server.post(RESPONSES, {**self.ASK, "input": [{"role": "user", "content": "Time?"},
                                                                   *first["output"], result]})
        stored = self.server.post(RESPONSES, {**self.ASK, "input": [result], "previous_response_id": first["id"]})
        self.assertEqual(whole["usage"]["input_tokens"], stored["usage"]["input_tokens"])
        chat = [{"role": "user", "content": "Time?"},
                {"role": "assistant", "content": "Let me see.", "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC"}'}}]},
                {"role": "tool", "tool_call_id": "1", "content": "5"}]
        tools = [{"type": "function", "function": {name: self.TOOLS[0][name] for name in ("name", "description", "parameters")}}]
        same = self.server.post(CHAT, {"messages": chat, "tools": tools, "max_tokens": 1})
        self.assertEqual(whole["usage"]["input_tokens"], same["usage"]["prompt_tokens"])

    def test_stream(self):
        events = stream(self.server, RESPONSES, self.ASK)
        self.assertEqual([event["sequence_number"] for event in events], list(range(len(events))))
        part = ["output_item.added", "content_part.added", "{}.delta", "{}.done", "content_part.done", "output_item.done"]
        call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
        names = ["created", "in_progress", *[name.format("reasoning_text") for name in part],
                 *[name.format("output_text") for name in part], *call, "incomplete"]
        self.assertEqual([event["type"] for event in events], [f"response.{name}" for name in names])
        last = events[-1]["response"]
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        self.assertEqual(done, last["output"])
        self.assertEqual([event["output_index"] for event in events if "item" in event], [0, 0, 1, 1, 2, 2])


class Unknown(ServerTest):
    def test_ids_without_a_tokenizer(self):
        folder = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        os.symlink(MODEL / "config.json", folder / "config.json")
        server = self.start("--random-weights", "1", "-c", "64", model=folder)
        status, _, body = server.request("POST", MESSAGES, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
        self.assertEqual((status, json.loads(body)["type"]), (400, "error"))
        self.stop(server)


if __name__ == "__main__":
    import unittest

    unittest.main()
