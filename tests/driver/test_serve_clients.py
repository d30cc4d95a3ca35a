"""kvzap serve with the official clients for Python. A client that is not installed is skipped."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

from harness import CASES, MODEL, PATIENCE
from test_serve import ASK, PRUNED, SharedServerTest, seed
from test_serve_protocols import CALLING, DOCUMENT, PARAMETERS, ToolsTest

try:
    import anthropic
except ImportError:
    anthropic = None
try:
    import openai
except ImportError:
    openai = None

try:
    import instructor
    import pydantic
except ImportError:
    instructor = None
try:
    import langchain_openai
except ImportError:
    langchain_openai = None
try:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the net
    import litellm
except ImportError:
    litellm = None
PROGRAMS = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", "")))
LLM = shutil.which("llm", path=PROGRAMS)
SCHEMATHESIS = shutil.which("schemathesis", path=PROGRAMS)

try:
    import jsonschema
    import openapi_spec_validator
except ImportError:
    openapi_spec_validator = None

try:
    import lm_eval
    import lm_eval.tasks
    import torch
    import transformers
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI
except ImportError:
    LocalCompletionsAPI = None

CASE = CASES[0]


@unittest.skipUnless(openai, "needs openai's client")
class OpenAI(SharedServerTest):
    """OpenAI's own client for Python."""

    def setUp(self):
        super().setUp()
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.server.port}/v1", api_key="x", timeout=PATIENCE,
                                    max_retries=0)
        self.addCleanup(self.client.close)
        self.ask = {"model": "recall-4m", "messages": ASK["messages"], "temperature": 0, "max_tokens": 24}

    def test_models(self):
        self.assertEqual([model.id for model in self.client.models.list()], ["recall-4m"])
        self.assertEqual(self.client.models.retrieve("recall-4m").id, "recall-4m")
        with self.assertRaisesRegex(openai.NotFoundError, "the model is 'a/b'; expected 'recall-4m'"):
            self.client.models.retrieve("a/b")

    def test_chat(self):
        reply = self.client.chat.completions.create(**self.ask, logprobs=True, top_logprobs=2)
        self.assertEqual(reply.choices[0].message.content, CASE["expected"])
        self.assertEqual((reply.object, reply.choices[0].finish_reason), ("chat.completion", "stop"))
        self.assertEqual(reply.usage.total_tokens, reply.usage.prompt_tokens + reply.usage.completion_tokens)
        self.assertGreater(reply.kvzap["evict_ratio"], 0)
        self.assertEqual(len(reply.choices[0].logprobs.content[0].top_logprobs), 2)
        full = self.client.chat.completions.create(**self.ask, extra_body={"kvzap": {"prune": "none"}})
        self.assertEqual(full.kvzap["evict_ratio"], 0)

    def test_chat_in_a_stream(self):
        chunks = list(self.client.chat.completions.create(**self.ask, stream=True, n=2,
                                                          stream_options={"include_usage": True}))
        for index in range(2):
            pieces = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
            self.assertEqual("".join(piece.delta.content or "" for piece in pieces), CASE["expected"])
            self.assertEqual(pieces[-1].finish_reason, "stop")
        self.assertGreater(chunks[-1].usage.prompt_tokens_details.cached_tokens, -1)
        self.assertGreater(chunks[-1].usage.completion_tokens, 0)

    def test_leaving(self):
        stream = self.client.chat.completions.create(**{**self.ask, "max_tokens": 3000}, stream=True,
                                                     extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        self.server.wait_until_idle()

    def test_completions(self):
        reply = self.client.completions.create(model="recall-4m", prompt=CASE["context"], max_tokens=5, temperature=0)
        chunks = list(self.client.completions.create(model="recall-4m", prompt=CASE["context"], max_tokens=5,
                                                     temperature=0, stream=True))
        self.assertEqual("".join(chunk.choices[0].text for chunk in chunks), reply.choices[0].text)
        self.assertEqual(reply.object, "text_completion")
        two = self.client.completions.create(model="recall-4m", prompt=[CASE["context"], "The sky"], max_tokens=5,
                                             temperature=0)
        self.assertEqual([choice.index for choice in two.choices], [0, 1])
        self.assertEqual(two.choices[0].text, reply.choices[0].text)

    def test_errors(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.chat.completions.create(**{**self.ask, "max_tokens": -2})
        self.assertEqual((caught.exception.param, caught.exception.status_code), ("max_tokens", 400))

    def test_embeddings(self):
        reply = self.client.embeddings.create(model="recall-4m", input=["a b", "c"])  # asks for base64
        plain = self.client.embeddings.create(model="recall-4m", input="c", encoding_format="float")
        self.assertEqual([one.index for one in reply.data], [0, 1])
        self.assertEqual(len(reply.data[1].embedding), len(plain.data[0].embedding))
        for found, expected in zip(reply.data[1].embedding, plain.data[0].embedding):
            self.assertAlmostEqual(found, expected, delta=1e-3)
        self.assertGreater(reply.usage.total_tokens, 2)


@unittest.skipUnless(openai, "needs openai's client")
class OpenAIResponses(ToolsTest):
    """The same client's calls of /v1/responses."""

    TOOLS = [{"type": "function", "name": "now", "parameters": PARAMETERS, "strict": False}]

    def setUp(self):
        super().setUp()
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.server.port}/v1", api_key="x", timeout=PATIENCE,
                                    max_retries=0)
        self.addCleanup(self.client.close)
        parts = [{**part, "type": "input_text"} for part in DOCUMENT]
        self.ask = {"model": "recall-4m", "input": [{"role": "user", "content": parts}], "temperature": 0,
                    "max_output_tokens": 24}

    def test_text(self):
        first = self.client.responses.create(**self.ask)
        self.assertEqual((first.output_text, first.status), (CASE["expected"], "completed"))
        self.assertEqual(self.client.responses.retrieve(first.id).output_text, first.output_text)
        second = self.client.responses.create(model="recall-4m", input="And now?", previous_response_id=first.id,
                                              max_output_tokens=4)
        self.assertGreater(second.usage.input_tokens, first.usage.input_tokens)
        self.client.responses.delete(first.id)
        with self.assertRaises(openai.NotFoundError):
            self.client.responses.retrieve(first.id)

    def test_stream(self):
        events = list(self.client.responses.create(**self.ask, stream=True))
        self.assertEqual("".join(event.delta for event in events if event.type == "response.output_text.delta"),
                         CASE["expected"])
        self.assertEqual(events[-1].response.output_text, CASE["expected"])
        with self.client.responses.stream(**self.ask) as stream:
            self.assertEqual(stream.get_final_response().output_text, CASE["expected"])

    def test_tools(self):
        ask = {"model": "recall-4m", "tools": self.TOOLS, "max_output_tokens": 1,
               "extra_body": {"logit_bias": CALLING["logit_bias"]}}
        items = [{"role": "user", "content": "Time?"}]
        first = self.client.responses.create(**ask, input=items)
        (call,) = [item for item in first.output if item.type == "function_call"]
        self.assertEqual((call.name, call.arguments), ("now", '{"zone":"UTC"}'))
        items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
        self.assertGreater(self.client.responses.create(**ask, input=items).usage.input_tokens,
                           first.usage.input_tokens)
        events = list(self.client.responses.create(**ask, input="Time?", stream=True))
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        self.assertEqual(done.arguments, call.arguments)

    def test_errors(self):
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.responses.create(**{**self.ask, "max_output_tokens": -2})
        self.assertEqual(caught.exception.param, "max_output_tokens")
        with self.assertRaises(openai.NotFoundError) as caught:
            self.client.responses.create(**{**self.ask, "model": "other"})
        self.assertEqual(caught.exception.code, "model_not_found")


@unittest.skipUnless(anthropic, "needs anthropic's client")
class Anthropic(ToolsTest):
    """Anthropic's own client for Python."""

    TOOLS = [{"name": "now", "description": "The time", "input_schema": PARAMETERS}]

    def setUp(self):
        super().setUp()
        self.client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{self.server.port}", api_key="x",
                                          timeout=PATIENCE, max_retries=0)
        self.addCleanup(self.client.close)
        # Later versions of the client have no argument for the temperature.
        self.ask = {"model": "recall-4m", "messages": [{"role": "user", "content": DOCUMENT}], "max_tokens": 24,
                    "extra_body": {"temperature": 0}}

    def test_text(self):
        reply = self.client.messages.create(**self.ask, system="Be brief.", stop_sequences=["zzz"])
        self.assertEqual((reply.type, reply.stop_reason), ("message", "end_turn"))
        reply = self.client.messages.create(**self.ask)
        self.assertEqual([block.text for block in reply.content], [CASE["expected"]])
        counted = self.client.messages.count_tokens(model="recall-4m", messages=self.ask["messages"])
        self.assertEqual(counted.input_tokens, reply.usage.input_tokens + reply.usage.cache_read_input_tokens)

    def test_stream(self):
        with self.client.messages.stream(**self.ask) as stream:
            self.assertEqual("".join(stream.text_stream), CASE["expected"])
            reply = stream.get_final_message()
        self.assertEqual((reply.content[0].text, reply.stop_reason), (CASE["expected"], "end_turn"))
        self.assertGreater(reply.usage.input_tokens + reply.usage.cache_read_input_tokens, 300)
        events = list(self.client.messages.create(**self.ask, stream=True))
        self.assertEqual((events[0].type, events[-1].type), ("message_start", "message_stop"))

    def test_tools(self):
        ask = {"model": "recall-4m", "tools": self.TOOLS, "max_tokens": 1, "extra_body": CALLING}
        turns = [{"role": "user", "content": "Time?"}]
        reply = self.client.messages.create(**ask, messages=turns)
        self.assertEqual([block.type for block in reply.content], ["thinking", "text", "tool_use"])
        self.assertEqual((reply.content[2].name, reply.content[2].input), ("now", {"zone": "UTC"}))
        with self.client.messages.stream(**ask, messages=turns) as stream:
            streamed = stream.get_final_message()
        self.assertEqual(streamed.content[2].input, {"zone": "UTC"})
        self.assertEqual(streamed.stop_reason, "tool_use")
        turns += [{"role": "assistant", "content": reply.content},
                  {"role": "user", "content": [{"type": "tool_result", "tool_use_id": reply.content[2].id, "content": "5"}]}]
        self.assertGreater(self.client.messages.create(**ask, messages=turns).usage.input_tokens, 0)

    def test_errors(self):
        with self.assertRaisesRegex(anthropic.BadRequestError, "max_tokens is 0"):
            self.client.messages.create(**{**self.ask, "max_tokens": 0})
        with self.assertRaisesRegex(anthropic.NotFoundError, "expected 'recall-4m'"):
            self.client.messages.create(**{**self.ask, "model": "other"})
        with self.assertRaisesRegex(anthropic.BadRequestError, "tool_choice.name is 'other'"):
            self.client.messages.create(**self.ask, tools=self.TOOLS, tool_choice={"type": "tool", "name": "other"})


WAY = {"title": "Way", "type": "object", "properties": {"way": {"enum": ["up", "down"]}}, "required": ["way"],
       "additionalProperties": False}
TURN = {"type": "function", "function": {"name": "turn", "description": "Turns", "parameters": WAY}}


NOTE = {"type": "object", "properties": {"text": {"type": "string", "minLength": 6, "maxLength": 12}, **WAY["properties"]},
        "required": ["text", "way"], "additionalProperties": False}


class PiecesOfArguments(ToolsTest):
    """The official clients get arguments in pieces, which join to those of the reply as a whole."""

    THINKS = False

    def check(self, pieces, whole):
        self.assertGreater(len(pieces), 3)
        self.assertEqual("".join(pieces), whole)
        self.assertEqual(set(json.loads(whole)), {"text", "way"})

    def openai_client(self):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.server.port}/v1", api_key="x", timeout=PATIENCE, max_retries=0)
        self.addCleanup(client.close)
        return client

    @unittest.skipUnless(openai, "needs openai's client")
    def test_chat(self):
        tool = {"type": "function", "function": {"name": "note", "parameters": NOTE}}
        ask = {"model": "recall-4m", "messages": [{"role": "user", "content": "Which way?"}], "temperature": 0, "max_tokens": 200,
               "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        client = self.openai_client()
        reply = client.chat.completions.create(**ask)
        (whole,) = reply.choices[0].message.tool_calls
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
        first, *pieces = [call for chunk in chunks for call in chunk.delta.tool_calls or []]
        self.assertEqual((first.index, first.function.name, first.function.arguments), (0, "note", ""))
        self.assertTrue(first.id)
        self.assertEqual({(piece.index, piece.id, piece.function.name) for piece in pieces}, {(0, None, None)})
        self.check([piece.function.arguments for piece in pieces], whole.function.arguments)
        self.assertEqual(chunks[-1].finish_reason, "tool_calls")
        with client.chat.completions.stream(**ask) as stream:
            (call,) = stream.get_final_completion().choices[0].message.tool_calls
        self.assertEqual(call.function.arguments, whole.function.arguments)
        cut = client.chat.completions.create(**{**ask, "max_tokens": reply.usage.completion_tokens * 3 // 5}).choices[0]
        self.assertEqual(cut.finish_reason, "length")
        self.assertTrue(whole.function.arguments.startswith(cut.message.tool_calls[0].function.arguments))

    @unittest.skipUnless(openai, "needs openai's client")
    def test_responses(self):
        ask = {"model": "recall-4m", "input": "Which way?", "temperature": 0, "max_output_tokens": 200, "tool_choice": "required",
               "parallel_tool_calls": False, "tools": [{"type": "function", "name": "note", "parameters": NOTE, "strict": True}]}
        client = self.openai_client()
        (whole,) = client.responses.create(**ask).output
        events = list(client.responses.create(**ask, stream=True))
        self.check([event.delta for event in events if event.type == "response.function_call_arguments.delta"], whole.arguments)
        (done,) = [event for event in events if event.type == "response.output_item.done"]
        self.assertEqual((done.item.name, done.item.arguments, done.item.status), ("note", whole.arguments, "completed"))
        with client.responses.stream(**ask) as stream:
            (call,) = stream.get_final_response().output
        self.assertEqual(call.arguments, whole.arguments)

    @unittest.skipUnless(anthropic, "needs anthropic's client")
    def test_messages(self):
        ask = {"model": "recall-4m", "messages": [{"role": "user", "content": "Which way?"}], "max_tokens": 200,
               "extra_body": {"temperature": 0}, "tools": [{"name": "note", "input_schema": NOTE}],
               "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{self.server.port}", api_key="x", timeout=PATIENCE, max_retries=0)
        self.addCleanup(client.close)
        (whole,) = client.messages.create(**ask).content
        with client.messages.stream(**ask) as stream:
            pieces = [event.delta.partial_json for event in stream
                      if event.type == "content_block_delta" and event.delta.type == "input_json_delta"]
            (block,) = stream.get_final_message().content
        self.assertEqual((block.name, block.input), (whole.name, whole.input))
        self.check(pieces, "".join(pieces))
        self.assertEqual(json.loads("".join(pieces)), whole.input)


@unittest.skipUnless(langchain_openai, "needs langchain-openai")
class LangChain(ToolsTest):
    THINKS = False

    def setUp(self):
        super().setUp()
        self.model = langchain_openai.ChatOpenAI(
            model="recall-4m", base_url=f"http://127.0.0.1:{self.server.port}/v1", api_key="x", timeout=PATIENCE, max_retries=0,
            temperature=0, max_tokens=120)

    def test_structured_output(self):
        for method in ("json_schema", "function_calling"):
            self.assertIn(self.model.with_structured_output(WAY, method=method).invoke("Which way?"), ({"way": "up"}, {"way": "down"}))

    def test_tools(self):
        bound = self.model.bind_tools([TURN], tool_choice="any", parallel_tool_calls=False)
        (call,) = bound.invoke("Which way?").tool_calls
        self.assertEqual((call["name"], set(call["args"])), ("turn", {"way"}))
        pieces = None
        for piece in bound.stream("Which way?"):
            pieces = piece if pieces is None else pieces + piece
        self.assertEqual([one["args"] for one in pieces.tool_calls], [call["args"]])

    def test_chat_in_a_stream(self):
        whole = self.model.invoke("Hello").content
        self.assertEqual("".join(piece.content for piece in self.model.stream("Hello")), whole)


@unittest.skipUnless(litellm, "needs litellm")
class LiteLLM(ToolsTest):
    THINKS = False

    def ask(self, **fields):
        return litellm.completion(model="openai/recall-4m", api_base=f"http://127.0.0.1:{self.server.port}/v1", api_key="x",
                                  timeout=PATIENCE, num_retries=0, messages=[{"role": "user", "content": "Which way?"}],
                                  temperature=0, max_tokens=120, **fields).choices[0]

    def test_schema_and_tools(self):
        format = {"type": "json_schema", "json_schema": {"name": "way", "schema": WAY, "strict": True}}
        self.assertIn(json.loads(self.ask(response_format=format).message.content)["way"], ("up", "down"))
        choice = self.ask(tools=[TURN], tool_choice="required", parallel_tool_calls=False)
        self.assertEqual((choice.finish_reason, choice.message.tool_calls[0].function.name), ("tool_calls", "turn"))


@unittest.skipUnless(instructor and openai, "needs instructor")
class Instructor(ToolsTest):
    THINKS = False

    def test_response_models(self):
        way = pydantic.create_model("Way", __config__=pydantic.ConfigDict(extra="forbid"), way=(str, pydantic.Field(pattern="^(up|down)$")))
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.server.port}/v1", api_key="x", timeout=PATIENCE, max_retries=0)
        self.addCleanup(client.close)
        for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
            asking = instructor.from_openai(client, mode=mode)
            answer = asking.chat.completions.create(model="recall-4m", response_model=way, max_retries=0, max_tokens=120, temperature=0,
                                                    messages=[{"role": "user", "content": "Which way?"}])
            self.assertIn(answer.way, ("up", "down"), mode)


@unittest.skipUnless(LLM, "needs llm")
class Llm(SharedServerTest):
    def test_json_objects(self):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "extra-openai-models.yaml").write_text(
                f"- model_id: kvzap\n  model_name: recall-4m\n  api_base: http://127.0.0.1:{self.server.port}/v1\n")
            result = subprocess.run([LLM, "-m", "kvzap", "-o", "json_object", "1", "-o", "temperature", "0", "--no-log", "--key", "x", "Hello"],
                                    env={**os.environ, "LLM_USER_PATH": folder}, capture_output=True, text=True, timeout=PATIENCE)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue(result.stdout.startswith("{"), result.stdout)


@unittest.skipUnless(openapi_spec_validator, "needs openapi-spec-validator")
class OpenApi(ToolsTest):
    """The document of /openapi.json is valid, and describes the replies."""

    def setUp(self):
        super().setUp()
        self.document = self.server.get("/openapi.json")

    def check(self, name, value):
        """Against the schema, in which all fields of the value have to be."""
        schemas = {key: self.closed(schema) for key, schema in self.document["components"]["schemas"].items()}
        whole = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
        jsonschema.Draft202012Validator(whole).validate(value)

    def closed(self, schema):
        if isinstance(schema, list):
            return [self.closed(one) for one in schema]
        if not isinstance(schema, dict):
            return schema
        closed = {key: self.closed(value) for key, value in schema.items()}
        if isinstance(schema.get("properties"), dict):
            closed.setdefault("additionalProperties", False)
        return closed

    def test_document(self):
        openapi_spec_validator.validate(self.document)

    def test_replies(self):
        messages = [{"role": "user", "content": "Time?"}]
        chat = {"messages": messages, "max_tokens": 4, "logprobs": True, "top_logprobs": 2, "kvzap": {"return_kept": True}}
        tools = [{"type": "function", "function": {"name": "now", "parameters": PARAMETERS}}]
        calls = {"messages": messages, "tools": tools, "max_tokens": 1, **CALLING}
        completion = {"prompt": "a b", "max_tokens": 3, "logprobs": 1, "echo": True}
        own = {"messages": messages, "max_tokens": 4}
        ids = self.server.post("/tokenize", {"content": "a b"})
        asked = [("/v1/chat/completions", chat), ("/v1/chat/completions", calls), ("/v1/completions", completion),
                 ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
                 ("/v1/embeddings", {"input": [1, 2]}), ("/v1/score", {"text_1": "a", "text_2": ["a", "b"]}),
                 ("/v1/rerank", {"query": "a", "documents": ["a", "b"], "top_n": 1}),
                 ("/v1/messages", own), ("/v1/messages/count_tokens", own), ("/detokenize", ids),
                 ("/tokenize", {"content": "a"})]
        for path, body in asked:
            operation = self.document["paths"][path]["post"]
            request = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
            with self.subTest(path):
                self.check(request, body)
                content = operation["responses"]["200"]["content"]
                reply = content["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
                self.check(reply, self.server.post(path, body))
                if "text/event-stream" not in content:
                    continue
                event = content["text/event-stream"]["x-event-schema"]["$ref"].rsplit("/", 1)[1]
                connection, response = self.server.open_stream(path, {**body, "return_progress": True})
                for line in response.read().decode().splitlines():
                    if line.startswith("data: {"):
                        self.check(event, json.loads(line[6:]))
                connection.close()
        stored = self.server.post("/v1/responses", {"input": "x", "max_output_tokens": 2})
        fields = self.document["components"]["schemas"]["Response"]["properties"]
        self.check("Response", {key: value for key, value in stored.items() if key in fields})
        for path, name in (("/v1/models", "Models"), ("/health", "Health"), ("/kvzap/status", "Status")):
            self.check(name, self.server.get(path))

    def test_errors(self):
        for path, name in (("/v1/completions", "Error"), ("/v1/messages", "MessagesError")):
            status, _, body = self.server.request("POST", path, {})
            self.assertEqual(status, 400)
            self.check(name, json.loads(body))


@unittest.skipUnless(SCHEMATHESIS, "needs schemathesis")
class Schemathesis(SharedServerTest):
    """Requests that schemathesis makes of /openapi.json: statuses, replies and refusals are those of the document."""

    # Without max_tokens, answers fill the context.
    FLAGS = [*PRUNED, "-c", "300", "--max-sequences", "8"]

    def test_requests(self):
        examples = os.environ.get("KVZAP_SCHEMATHESIS_EXAMPLES", "10")
        # A schema cannot say all that a request has to be, such as that a tool_choice needs tools.
        command = [SCHEMATHESIS, "--no-color", "run", f"http://127.0.0.1:{self.server.port}/openapi.json", "--exclude-checks", "positive_data_acceptance",
                   "-n", examples, "--seed", str(seed()), "-w", "1", "--continue-on-failure", "--request-timeout", "100"]
        with tempfile.TemporaryDirectory() as folder:
            result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=3 * PATIENCE)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)


@unittest.skipUnless(LocalCompletionsAPI, "needs lm_eval and transformers")
class LmEval(SharedServerTest):
    """lm-evaluation-harness' model local-completions: log likelihoods of continuations are those of transformers."""

    FLAGS = ["--dtype", "f32"]
    # A choice among numbers after a document, and a sentence word by word.
    CHOICES = [(CASE["context"][:600] + " What is the number? The number is", f" {number}") for number in (1234, 507, 88)]
    WORDS = [("The special magic", " number for delta"), ("The special magic number for delta", " is 4467."), ("A", " b"),
             (f"<|im_start|>user\n{CASE['context']}{CASE['question']}<|im_end|>\n<|im_start|>assistant\n", CASE["expected"])]

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        cls.model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)

    def reference(self, context, continuation):
        whole, begin = (self.tokenizer.encode(text) for text in (context + continuation, context))
        with torch.no_grad():
            logprobs = torch.log_softmax(self.model(torch.tensor([whole])).logits[0, :-1].double(), dim=-1)
        ids = torch.tensor(whole[1:])
        own = logprobs[torch.arange(len(ids)), ids][len(begin) - 1:]
        return own.sum().item(), bool((logprobs.argmax(-1) == ids)[len(begin) - 1:].all())

    def test_log_likelihoods(self):
        asked = self.CHOICES + self.WORDS
        expected = [self.reference(*one) for one in asked]
        self.assertEqual([greedy for _, greedy in expected], [*(len(asked) - 1) * [False], True])
        for tokenized in (True, False):
            model = LocalCompletionsAPI(model="recall-4m", tokenizer=str(MODEL), tokenized_requests=tokenized,
                                        base_url=f"http://127.0.0.1:{self.server.port}/v1/completions", batch_size=2)
            found = model.loglikelihood([Instance("loglikelihood", {}, one, i) for i, one in enumerate(asked)],
                                        disable_tqdm=True)
            for (logprob, is_greedy), (wanted, greedy) in zip(found, expected):
                self.assertAlmostEqual(logprob, wanted, delta=1e-3)
                self.assertEqual(is_greedy, greedy)

    def test_tasks(self):
        """Tasks of local files have the same figures as with the harness' own model of transformers."""
        questions = [{"context": case["context"][-300:] + " The number is", "choices": ["1234", "507", "88", case["expected"][-5:-1]], "answer": i % 4}
                     for i, case in enumerate(CASES[:4])]
        texts = [{"text": text} for case in CASES[:2] for text in (case["context"][:900], case["question"] + " " + case["expected"])]
        common = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1}}
        tasks = {"local_choice": {"output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
                                  "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
                 "local_perplexity": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
                                      "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}]}}
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        for (name, task), rows in zip(tasks.items(), (questions, texts)):
            (folder / f"{name}.json").write_text("\n".join(map(json.dumps, rows)))
            # JSON is YAML.
            (folder / f"{name}.yaml").write_text(json.dumps({
                "task": name, **common, "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.json")}, "cache_dir": str(folder / "cache")}, **task}))
        manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)

        def figures(model, arguments):
            found = lm_eval.simple_evaluate(model=model, model_args=arguments, tasks=list(tasks), task_manager=manager, batch_size=1, bootstrap_iters=0,
                                            log_samples=True)
            # A response is a log probability, or one and whether the choice is the likeliest.
            logprobs = [response if isinstance(response, float) else response[0] for name in tasks
                        for sample in found["samples"][name] for response in sample["filtered_resps"]]
            return {(task, metric): value for task, all in found["results"].items() for metric, value in all.items() if isinstance(value, float)}, logprobs

        length = self.model.config.max_position_embeddings
        wanted, wanted_logprobs = figures("hf", {"pretrained": str(MODEL), "dtype": "float32", "device": "cpu", "max_length": length})
        found, logprobs = figures("local-completions", {
            "model": "recall-4m", "tokenizer": str(MODEL), "base_url": f"http://127.0.0.1:{self.server.port}/v1/completions", "max_length": length})
        self.assertEqual(len(wanted), 5 + sum(name.endswith("stderr") for _, name in wanted), wanted)
        self.assertEqual(set(found), set(wanted))
        for name, value in wanted.items():
            self.assertAlmostEqual(found[name], value, delta=1e-4 * abs(value), msg=name)
        self.assertEqual(len(logprobs), len(wanted_logprobs))
        for one, other in zip(logprobs, wanted_logprobs):
            self.assertAlmostEqual(one, other, delta=1e-3 + 1e-5 * abs(other))


if __name__ == "__main__":
    unittest.main()
