"""Answers of kvzap serve that schemas, grammars and tools restrict."""
import json
import threading
import time
import unittest

from harness import CASES
from test_serve import CHAT, PLAIN, SharedServerTest, text_of
from test_serve_protocols import MESSAGES, RESPONSES, ToolsTest
from test_structured import SCHEMA, check

ASK = {"messages": [{"role": "user", "content": CASES[0]["context"]}], "max_tokens": 120}
TOOLS = [{"type": "function", "function": {"name": "now", "strict": True, "parameters": {
    "type": "object", "properties": {"zone": {"type": "string", "maxLength": 5}}, "required": ["zone"]}}},
    {"type": "function", "function": {"name": "later"}}]


class Answers(SharedServerTest):
    def ask(self, path=CHAT, **fields):
        return self.server.post(path, {**ASK, **fields})

    def test_schemas(self):
        for fields in ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
                       {"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}):
            for seed in range(4):
                reply = self.ask(**fields, temperature=1.5, seed=seed, n=2)
                for choice in reply["choices"]:
                    if choice["finish_reason"] == "stop":  # others are cut by max_tokens
                        check(choice["message"]["content"], self)
        reply = self.ask(response_format={"type": "json_object"}, temperature=0)
        self.assertTrue(reply["choices"][0]["message"]["content"].startswith("{"))
        self.assertEqual(self.ask(guided_choice=["yes", "no"])["choices"][0]["message"]["content"][0] in "yn", True)

    def test_streams_equal_whole_replies(self):
        fields = {"guided_regex": "[A-Z]{3}-[0-9]{4}", "temperature": 2, "seed": 5}
        whole = text_of(self.ask(**fields))
        self.assertRegex(whole, r"\A[A-Z]{3}-[0-9]{4}\Z")
        events = self.server.stream(CHAT, {**ASK, **fields})
        self.assertEqual("".join(event["choices"][0]["delta"].get("content") or "" for event in events
                                 if event["choices"]), whole)

    def test_completions_and_other_endpoints(self):
        text = self.ask(PLAIN, prompt="The code is", messages=None, guided_regex="[0-9]{3}")["choices"][0]["text"]
        self.assertRegex(text, r"\A[0-9]{3}\Z")
        reply = self.server.post(RESPONSES, {"input": "Hello", "max_output_tokens": 90, "temperature": 0, "text": {
            "format": {"type": "json_schema", "name": "x", "schema": {"enum": ["up", "down"]}}}})
        self.assertIn(json.loads(reply["output"][-1]["content"][0]["text"]), ("up", "down"))

    def test_an_answer_ends_with_its_grammar(self):
        reply = self.ask(guided_choice=["a"], ignore_eos=True)
        self.assertEqual((text_of(reply), reply["choices"][0]["finish_reason"]), ("a", "stop"))
        # Free grammars leave greedy answers as they are.
        free = text_of(self.ask(guided_regex="[^]*", temperature=0, max_tokens=24))
        self.assertEqual(free, text_of(self.ask(temperature=0, max_tokens=24)))

    def test_errors(self):
        for fields, words in (({"guided_regex": "(?=a)"}, "guided_regex"), ({"guided_json": {"contains": {}}}, "/contains"),
                              ({"grammar": "root ::= ("}, "line 1"), ({"response_format": {"type": "xml"}}, "response_format.type"),
                              ({"guided_json": {"type": "object"}, "grammar": "root ::= \"a\""}, "exclude each other"),
                              ({"guided_json": {"enum": []}}, "guided_json"),
                              ({"guided_regex": "()", "ignore_eos": True}, "no token is left")):
            status, _, body = self.server.request("POST", CHAT, {**ASK, **fields})
            self.assertEqual(status, 400, fields)
            self.assertIn(words, json.loads(body)["error"]["message"])

    def test_hostile_forms(self):
        """Each is refused, or ends its own request alone."""
        deep = '{"items":' * 45000 + "{}" + "}" * 45000
        # Rules of one letter and as many that call each of them: looking for callers takes 27 million steps after one byte.
        callers = "\n".join(["root ::= (" + "|".join(f"c{i}" for i in range(300)) + ")*",
                             *(f"c{i} ::= " + "|".join(f"t{k}" for k in range(300)) for i in range(300)),
                             *(f't{i} ::= "e" [a-z]?' for i in range(300))])
        for fields in ({"guided_json": deep}, {"grammar": 'root ::= root root root | "a" | ""'}, {"guided_regex": "(" * 60000},
                       {"grammar": "root ::= s\ns ::= [a-z ] | s s s"}, {"guided_json": {"type": "string", "minLength": 6000, "format": "email"}},
                       {"guided_json": {"$ref": "#"}}, {"grammar": "root ::= [a-z ] root | [a-z ]"}, {"grammar": callers}):
            begin = time.monotonic()
            status, _, body = self.server.request("POST", CHAT, {**ASK, "max_tokens": 300, "ignore_eos": True, **fields})
            self.assertIn(status, (200, 400), body[:300])
            self.assertEqual(text_of(self.ask(guided_choice=["b"])), "b")
            self.assertLess(time.monotonic() - begin, 30)

    def test_none_waits_for_the_grammars_of_others(self):
        # Each takes most of a second, and is refused then.
        slow = [threading.Thread(target=self.server.request, args=("POST", CHAT, {**ASK, "guided_json": {
            "type": "string", "minLength": length, "format": "email"}})) for length in range(1000, 1012)]
        known = {"guided_choice": ["a", "b"], "max_tokens": 1}
        self.ask(**known)
        for thread in slow:
            thread.start()
        self.ask(max_tokens=1)
        self.ask(**known)
        self.assertTrue(any(thread.is_alive() for thread in slow))
        for thread in slow:
            thread.join()


class Tools(ToolsTest):
    def call(self, **fields):
        reply = self.server.post(CHAT, {**ASK, "tools": TOOLS, "temperature": 1.0, "seed": 3, **fields})
        return reply["choices"][0]

    def test_required_and_named(self):
        for choice in ("required", {"type": "function", "function": {"name": "now"}},
                       {"type": "function", "function": {"name": "later"}}):
            one = self.call(tool_choice=choice, parallel_tool_calls=False)
            self.assertEqual(one["finish_reason"], "tool_calls", one)
            (call,) = one["message"]["tool_calls"]
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "now":
                self.assertEqual(set(arguments), {"zone"})
                self.assertLessEqual(len(arguments["zone"]), 5)
            else:
                self.assertEqual(arguments, {})
            if isinstance(choice, dict):
                self.assertEqual(call["function"]["name"], choice["function"]["name"])

    def test_messages_of_anthropic(self):
        reply = self.server.post(MESSAGES, {
            "messages": [{"role": "user", "content": "What is the time?"}], "max_tokens": 90, "seed": 3,
            "tools": [{"name": "later", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True}})
        self.assertEqual(reply["stop_reason"], "tool_use", reply)
        self.assertEqual([(one["name"], one["input"]) for one in reply["content"] if one["type"] == "tool_use"], [("later", {})])


if __name__ == "__main__":
    unittest.main()
