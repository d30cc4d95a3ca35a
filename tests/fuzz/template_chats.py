"""Chats for published templates: turns, system messages, tools, thoughts, documents and odd messages."""

import itertools

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Says the weather of a city.\nUse it \"often\".",
    "parameters": {"type": "object", "required": ["city"], "properties": {
        "city": {"type": "string", "description": "The city, e.g. Zürich"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
        "days": {"type": ["integer", "null"], "minimum": 1}}},
    "return": {"type": "string"}}}
SEARCH = {"type": "function", "function": {
    "name": "search", "description": "Searches.", "strict": True,
    "parameters": {"type": "object", "additionalProperties": False, "$defs": {"range": {"type": "object"}}, "properties": {
        "query": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "filter": {"type": "object", "description": "A filter", "properties": {
            "from": {"type": "number", "nullable": True}, "tags": {"type": "array", "items": {"type": "object", "properties": {
                "name": {"type": "string"}}}}}, "required": ["from"]}}}}}
PLAIN = {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}}
BARE = {"name": "bare", "description": "A tool without the object around it.", "parameters": {"type": "object", "properties": {}}}
DOCUMENTS = [{"title": "One", "text": "A text.\nTwo lines."}, {"title": "Zwei", "text": "\u00dcber \"x\" <b>"}]

ODD = " A <b>\"quoted\"</b> caf\u00e9 \u6570\u5b57 \U0001f600 {{ x }} {% if %} \\n\t'x'\r\n\u2028 end \n"
SYSTEM = {"role": "system", "content": "Be brief."}
HELLO = {"role": "user", "content": "Hello."}
ANSWER = {"role": "assistant", "content": "Hi, you."}
AGAIN = {"role": "user", "content": "And now?"}


def call(name, arguments, number):
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content, number, name="get_weather"):
    return {"role": "tool", "tool_call_id": f"call{number:05}", "name": name, "content": content}


def calling(*calls, **fields):
    return {"role": "assistant", "content": "", **fields, "tool_calls": list(calls)}


ARGUMENTS = {"city": "Z\u00fcrich", "days": 2, "exact": True, "none": None, "f": 1.0, "e": 1e22, "l": [1, "a", {"b": []}]}
THOUGHT = "First I think.\nThen\u2026 "
THOUGHTFUL = {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\nDone."}
PARTS = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]

MESSAGES = {
    "single": [HELLO],
    "turns": [HELLO, ANSWER, AGAIN],
    "system": [SYSTEM, HELLO],
    "system turns": [SYSTEM, HELLO, ANSWER, AGAIN, ANSWER, HELLO],
    "developer": [{"role": "developer", "content": "Be kind."}, HELLO],
    "system and developer": [SYSTEM, {"role": "developer", "content": "Be kind."}, HELLO, ANSWER],
    "empty system": [{"role": "system", "content": ""}, HELLO],
    "late system": [HELLO, ANSWER, SYSTEM, AGAIN],
    "system alone": [SYSTEM],
    "answer last": [SYSTEM, HELLO, ANSWER],
    "answer first": [ANSWER, HELLO],
    "two questions": [HELLO, AGAIN],
    "two answers": [HELLO, ANSWER, ANSWER, AGAIN],
    "odd text": [{"role": "system", "content": ODD}, {"role": "user", "content": ODD}, {"role": "assistant", "content": ODD},
                 {"role": "user", "content": ""}],
    "call": [HELLO, calling(call("get_weather", ARGUMENTS, 1))],
    "call and result": [SYSTEM, HELLO, calling(call("get_weather", ARGUMENTS, 1)), result("22 degrees", 1)],
    "call with text": [HELLO, calling(call("get_weather", '{"city": "Bern", "days": 1}', 1), content="Let me look."),
                       result('{"t": 22, "ok": true}', 1), ANSWER, AGAIN],
    "calls": [SYSTEM, HELLO, calling(call("get_weather", {"city": "Bern"}, 1), call("search", {"query": ["a", "b"]}, 2)),
              result("22", 1), result("none", 2, "search"), ANSWER, AGAIN, calling(call("now", {}, 3)), result("12:00", 3, "now")],
    "call without content": [HELLO, calling(call("now", {}, 1), content=None), result("12:00", 1, "now")],
    "call without id": [HELLO, {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {}}}]},
                        {"role": "tool", "content": "12:00"}, ANSWER],
    "bare call": [HELLO, {"role": "assistant", "content": "", "tool_calls": [{"name": "now", "arguments": {"a": ODD}}]},
                  {"role": "tool", "name": "now", "content": "12:00"}],
    "call of text": [HELLO, calling(call("search", "not JSON", 1)), result("x", 1, "search")],
    "result of parts": [HELLO, calling(call("now", {}, 1)), {**result("", 1), "content": PARTS}],
    "result as object": [HELLO, calling(call("now", {}, 1)), {**result("", 1), "content": {"t": 22, "l": [1.5, None]}}],
    "other roles": [HELLO, {"role": "ipython", "content": "1"}, {"role": "function", "name": "f", "content": "2"},
                    {"role": "tool_response", "content": "3"}, {"role": "observation", "content": "4"}],
    "tool plan": [HELLO, calling(call("search", {"query": "x"}, 1), tool_plan="I will search."), result("x", 1, "search")],
    "thoughts": [HELLO, {**ANSWER, "reasoning_content": THOUGHT}, AGAIN],
    "last thoughts": [SYSTEM, HELLO, {**ANSWER, "thinking": THOUGHT}],
    "written thoughts": [HELLO, THOUGHTFUL, AGAIN, THOUGHTFUL],
    "empty thoughts": [HELLO, {**ANSWER, "reasoning_content": ""}, AGAIN],
    "thoughts and calls": [SYSTEM, HELLO, calling(call("get_weather", {"city": "Bern"}, 1), reasoning_content=THOUGHT), result("22", 1),
                           calling(call("now", {}, 2), reasoning_content="More."), result("12", 2, "now"),
                           {**ANSWER, "reasoning_content": "Done."}, AGAIN],
    "thoughts and a call": [HELLO, calling(call("search", {"query": "x"}, 1), reasoning=THOUGHT), result("y", 1, "search")],
    "parts": [{"role": "system", "content": PARTS}, {"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS},
              {"role": "user", "content": [{"type": "text", "text": ODD}]}],
    "image": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which?"}]}],
    "media": [{"role": "user", "content": [{"type": "text", "text": "All:"}, {"type": "image_url", "image_url": {"url": "x.png"}},
                                           {"type": "video"}, {"type": "audio", "audio": "x"}]}],
    "thinking parts": [HELLO, {"role": "assistant", "content": [{"type": "thinking", "thinking": "T."}, {"type": "text", "text": "A."}]}, AGAIN],
    "no content": [HELLO, {"role": "assistant"}, AGAIN],
    "unknown role": [HELLO, {"role": "narrator", "content": "Then."}],
    "numbers": [{"role": "user", "content": 5}, ANSWER],
    "names": [{"role": "user", "name": "Ann", "content": "Hello."}, {"role": "assistant", "name": "Bot", "content": "Hi.", "weight": 1}],
    "nothing": [],
}

TOOLS = {"no tools": None, "one tool": [WEATHER], "tools": [WEATHER, SEARCH, PLAIN], "a bare tool": [BARE], "empty tools": []}
VARIABLES = {
    "plain": {},
    "thinking": {"enable_thinking": True, "thinking": True},
    "no thinking": {"enable_thinking": False, "thinking": False},
    "options": {"enable_thinking": True, "date_string": "26 Jul 2024", "tools_in_user_message": False, "reasoning_effort": "high",
                "builtin_tools": ["browser", "python"], "model_identity": "You are kvzap.", "thinking_budget": 512, "add_vision_id": True,
                "clear_thinking": False, "preserve_thinking": True, "keep_past_thinking": True, "custom_tools": None,
                "xml_tools": None, "functions": None, "strict_tools": True, "response_format": {"type": "json_object"}},
    "documents": {"documents": DOCUMENTS, "citation_mode": "fast", "safety_mode": "none", "controls": {"length": "long"}},
}


def is_tested(messages, tools, variables):
    """All combinations would be too many: the rarer tools and variables occur with chats that use tools, and some others."""
    uses_tools = any("tool_calls" in message for message in MESSAGES[messages])
    common = messages in ("single", "system turns", "thoughts", "written thoughts", "parts")
    return (tools in ("no tools", "tools") or uses_tools or common) and (
        variables not in ("options", "documents") or uses_tools or common)


def chats():
    """Yields a name, and the variables of a template."""
    for messages, tools, variables, prompts in itertools.product(MESSAGES, TOOLS, VARIABLES, (True, False)):
        if is_tested(messages, tools, variables):
            yield f"{messages}, {tools}, {variables}, add_generation_prompt={prompts}", {
                "bos_token": "<s>", "eos_token": "</s>", "messages": MESSAGES[messages], "tools": TOOLS[tools], "documents": None,
                "add_generation_prompt": prompts, **VARIABLES[variables]}
