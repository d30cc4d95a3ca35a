#!/usr/bin/env python3
"""Writes tests/golden/tokenizer: small tokenizers, and what the reference makes of many texts.

The reference is Hugging Face's tokenizers library; the chat templates are rendered by transformers.
Run from anywhere, without network access:

    python3 -m venv venv && venv/bin/pip install tokenizers transformers jinja2
    venv/bin/python tests/golden/make_tokenizer_goldens.py

The output depends on nothing but this script, inputs/models/recall-4m/tokenizer.json and the
versions of the two packages, which it records.

    <name>/tokenizer.json   byte-level BPE, trained here, with the pre-tokenizer of a published family
    texts.json              texts, as hexadecimal bytes since some are not UTF-8
    <name>.json             ids of each text, ids with special tokens, and decodings
    templates.json          chat templates, with what is put before and after the user's message, and
                            around those of a user and an assistant
"""

import json
import pathlib
import random
import tempfile
from unicodedata import ucd_3_2_0

import tokenizers
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE / "tokenizer"
RECALL = HERE.parent.parent / "inputs/models/recall-4m/tokenizer.json"

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's what we'll do, they've said; I'd agree.",
    "def main(argc, argv):\n    for i in range(10):\n        print(f'{i:03d}')\n    return 0\n",
    "int main() {\n\tstd::vector<int> values = {1, 2, 3};\n\treturn values.size() == 3;\n}\n",
    "In 2024, 12345 people paid 1,000,000.50 euros.  Two  spaces,   three.\r\n\r\nNew paragraph.",
    "Größe, naïve café, señor, Žluťoučký kůň, Łódź, ångström. Voilà l'été déjà passé.",
    "Привет, как дела? Всё хорошо, спасибо. Съешь же ещё этих мягких французских булок.",
    "你好,世界。今天的天气很好,我们去公园吧。日本語の文章です。カタカナとひらがな。",
    "안녕하세요 세계. مرحبا بالعالم. שלום עולם. नमस्ते दुनिया। สวัสดีชาวโลก. Γειά σου Κόσμε.",
    "emoji 😀😃 👩‍👩‍👧‍👦 👍🏽 🇩🇪 flags; math ∑∫√ ≤≥; arrows →⇒; quotes “double” ‘single’ – dash — ellipsis…",
    "    indented\n        more\n\n\n\t\ttabs\t\t\nTHE END IS NEAR. camelCaseWords HTTPServer iPhone XMLHttpRequest",
] * 3

TEXTS = [
    "", " ", "  ", "\n", "\r\n", "\t", "a", " a", "a ", "\0", "a\0b", "\x7f", "\x1c\x1d\x1e\x1f",
    "Hello, world!", "It's they'RE we'Ve I'M you'll he'D 'S 'ſ ’s", "'s't're", "don't stop",
    "x = 3.14159 * 10**-12", "1", "12", "123", "1234", "1234567", "1234567890123456", "٣٤٥٦", "²³¼Ⅷ",
    "a1b22c333", "12 345,678.90", "v1.2.3-rc4", "0x7fFF", "３４５",
    "line one\nline two\r\nline three\rline four", "\n\n\n", "\r\n\r\n  \r\n x", " \n \n", "a  \n  b",
    "trailing   ", "   leading", "a   b", "a    \tb", "\t\t\tx", "a \u00a0b", "\u00a0\u00a0", "x\u0085y",
    "\u0085", " \u0085\n", "\u3000全角\u3000", "a\u2003b\u2009c", "a\u200bb", "\ufeffbom",
    "a\u180eb", " \u180e ", "\u2028line\u2029par", "x\u000by\u000cz", "\u1680ogham", "\u202f\u205f",
    "if (a && b) {\n    return c[0]->d;\n}\n", "for i in x:\n\t\tpass  # comment\n", "<div class=\"a\">&amp;</div>",
    "http://example.org/a/b?c=d&e=f#g", "user@example.com", "C:\\path\\to\\file", "a/b/c\n//d\n\n/",
    "!!!???...", "---\n***\n___", "$100 €200 £300 ¥400", "#hashtag @mention", "~!@#$%^&*()_+{}|:\"<>?",
    "é", "e\u0301", "E\u0301\u0323", "q\u0323\u0307", "q\u0307\u0323", "\u0344", "\u212b \u2126 \u00c5",
    "ﬁ ﬂ ﬆ", "\u1e9b\u0323", "한글", "\u1112\u1161\u11ab\u1100\u1173\u11af", "\u0301start", "\u0958 \u09dc",
    "a\u0301\u0301\u0301", "\u0f71\u0f72\u0f74", "\u0308\u0301", "ཱི", "\U0001d15e\U0001d1bc",
    "\uf900\ufa10 \U0002f800", "ι\u0308\u0301 \u1fbe", "ё й Ё Й", "Å Å Å",
    "Привет МИР приВет", "你好世界", "日本語テキスト処理", "안녕하세요", "مرحبا بك", "שלום", "हिन्दी", "ภาษาไทย", "ქართული",
    "Ελληνικά ΣΊΣΥΦΟΣ ς", "İstanbul ıI iİ", "straße STRASSE ẞ", "ǅ ǈ ǋ ᾈ", "ʰʲ ª º", "ᏣᎳᎩ", "Ⴀⴀ",
    "😀", "👩‍👩‍👧‍👦 family", "👍🏽👍", "🇩🇪🇫🇷", "❤️ ☺️", "1️⃣2️⃣", "\U000e0001", "\U0010ffff", "\ue000",
    "HTTPServer camelCase XMLHttpRequest ABCdef", "ÀÉÎ àéî ÀéÎ", "Aa aA AA aa", "A\u0301B\u0301c",
    "<|endoftext|>", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "a<|endoftext|>b",
    "a <|endoftext|> b", "<|endoftext|", "<|<|endoftext|>|>", "<|endoftext|><|endoftext|>",
    "<|im_start|> <|im_end|>", "x<|im_end|>\n\n<|im_end|>", "<|begin_of_text|>hello",
    "left  <left>  right", "right  <right>  left", "both \n<both>\n both", "<left><right><both>",
    "  <left>", "<right>  ", "  <both>  ", "\u3000<both>\u3000x", "<right>  <left>", "<both>  <both>",
    "word WORD words", "WORD", "aWORD", "WORDa", "a WORD.", "WORD_", "WORD\u0301", "éWORD", "(WORD)",
    "WORDWORD", "WORD WORD", "Ⓐ WORDⒶ", "WORD\u200d", "WORD٣", "²WORD", "caf\u00e9tok", "cafe\u0301tok",
    "xcafe\u0301tok\u0301", "newtok newtoken new", "newtokennewtok", "a" * 100, "ab" * 60, " " * 70 + "x",
    "x" + "\n" * 40, "的" * 50, "!" * 70, "A" * 40 + "b", "\u0301" * 30, "1" * 50,
]

BYTES = [
    b"\xff", b"a\xffb", b"\xc3", b"\xc3(", b"\xe2\x82", b"\xe2\x82x", b"\xed\xa0\x80", b"\xf0\x9f\x98",
    b"\xf0\x9f\x98\x80\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\xe0\x80\x80", b"\xf8\x88\x80\x80\x80",
    b"ok \xe4\xbd\xa0\xe5\xa5 end", b"\x80\x81", b"\xfe\xff", b"a\xf1\x80\x80<|im_end|>\xc3",
]  # fmt: skip


def random_texts(rng):
    ranges = [
        (0x20, 0x7E), (0x20, 0x7E), (0x09, 0x0D), (0x80, 0x24F), (0x250, 0x36F), (0x370, 0x52F),
        (0x590, 0x6FF), (0x900, 0xDFF), (0xE00, 0x11FF), (0x1E00, 0x20CF), (0x2100, 0x2BFF),
        (0x3000, 0x30FF), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0xFE00, 0xFFEF), (0x1D400, 0x1D7FF),
    ]  # fmt: skip
    for _ in range(70):
        pieces = []
        for _ in range(rng.randint(1, 5)):
            low, high = rng.choice(ranges)
            # Characters of later versions of Unicode have their categories in some libraries only.
            characters = [chr(rng.randint(low, high)) for _ in range(rng.randint(1, 4))]
            pieces.append("".join(c for c in characters if ucd_3_2_0.category(c) != "Cn"))
        yield rng.choice(["", " "]).join(pieces)
    alphabet = " \n\r\t'sStTa1.é\u0301\u0085\u00a0<|>"
    for _ in range(30):
        yield "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 24)))


def added(content, **flags):
    return AddedToken(content, **{"normalized": False, "special": False, **flags})


def trained(pre_tokenizer, merges, special, normalizer=None, ignore_merges=False):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([added(token, special=True) for token in special])
    tokenizer.add_tokens(
        [
            added("<left>", lstrip=True),
            added("<right>", rstrip=True),
            added("<both>", lstrip=True, rstrip=True, special=True),
            added("WORD", single_word=True),
            added("cafétok", normalized=True),
            added("newtok", normalized=True),
            added("newtoken"),
        ]
    )
    return tokenizer


def split_then_bytes(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def make_tokenizers():
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    result = {"recall-4m": Tokenizer.from_file(str(RECALL))}
    result["qwen2"] = trained(split_then_bytes(QWEN2), 300, chatml, normalizers.NFC())
    llama = ["<|begin_of_text|>", "<|eot_id|>"]
    result["llama3"] = trained(split_then_bytes(LLAMA3), 300, llama, ignore_merges=True)
    bos = ("<|begin_of_text|>", result["llama3"].token_to_id("<|begin_of_text|>"))
    result["llama3"].post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                pair="<|begin_of_text|> $A <|begin_of_text|> $B:1",
                special_tokens=[bos],
            ),
        ]
    )
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    result["gpt2"] = trained(gpt2, 300, ["<|endoftext|>"])
    result["gpt2"].post_processor = processors.ByteLevel(trim_offsets=True)
    result["nemo"] = trained(split_then_bytes(TEKKEN), 300, ["<s>", "</s>"], ignore_merges=True)
    # Not a published family: the other pre-tokenizers and behaviours, one after another.
    mixed = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[\r\n]+"), "merged_with_previous"),
            pre_tokenizers.Split("<", "merged_with_next"),
            pre_tokenizers.Split(Regex(r"[\p{P}\p{S}]"), "contiguous"),
            pre_tokenizers.Split(Regex(r"\t"), "removed"),
            pre_tokenizers.Split(Regex(r"[^\x{b}]+"), "removed", invert=True),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True),
        ]
    )
    result["mixed"] = trained(mixed, 200, ["<|endoftext|>"], normalizers.Sequence([normalizers.NFC()]))
    return result


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n")


def write_tokenizers():
    rng = random.Random(20240731)
    texts = [t.encode() for t in TEXTS + list(random_texts(rng))] + BYTES
    write(OUT / "texts.json", [t.hex() for t in texts])
    for name, tokenizer in make_tokenizers().items():
        if name != "recall-4m":
            value = json.loads(tokenizer.to_str())
            if name == "gpt2":  # as files of older releases have them
                value["model"]["merges"] = [" ".join(m) for m in value["model"]["merges"]]
            write(OUT / name / "tokenizer.json", value)
            tokenizer = Tokenizer.from_str(json.dumps(value))
        cases, decodings = [], []
        for text in texts:
            text = text.decode("utf-8", errors="replace")
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            cases.append(ids)
        size = tokenizer.get_vocab_size()
        for _ in range(40):
            ids = [rng.randrange(size + 3) for _ in range(rng.randint(0, 12))]
            decodings.append([ids, tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)])
        for ids in cases[::3]:
            decodings.append([ids, tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=False)])
        write(
            OUT / f"{name}.json",
            {
                "made_by": f"tokenizers {tokenizers.__version__}",
                "vocabulary_size": size,
                "special": [k for k, t in tokenizer.get_added_tokens_decoder().items() if t.special],
                "ids": cases,
                "hello_with_special_tokens": tokenizer.encode("Hello").ids,
                "decodings": decodings,
            },
        )


# Templates in the form the model families publish them, shortened where tools are described.
CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

QWEN2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

QWEN25_TEMPLATE = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {%- endif %}
    {{- "\n\n# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>{\"name\": <function-name>}<|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- tool_call.arguments | tojson }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

QWEN3_TEMPLATE = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\n<tools></tools><|im_end|>\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '\n<tool_response>\n' }}
        {{- content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA3_TEMPLATE = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    "+ message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)

LLAMA31_TEMPLATE = r"""{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The system message goes into the header below. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{#- System message + builtin tools #}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if builtin_tools is defined or tools is not none %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{%- if builtin_tools is defined %}
    {{- "Tools: " + builtin_tools | reject('equalto', 'code_interpreter') | join(", ") + "\n\n"}}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {{- "You have access to the following functions." }}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}

{#- Tools in a user message #}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first_user_message = messages[0]['content']|trim %}
        {%- set messages = messages[1:] %}
    {%- else %}
        {{- raise_exception("no user message") }}
{%- endif %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}

{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("one call at once") }}
        {%- endif %}
        {%- if builtin_tools is defined and tool_call.name in builtin_tools %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
            {{- "<|python_tag|>" + tool_call.name + ".call(" }}
        {%- endif %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

LLAMA32_TEMPLATE = LLAMA31_TEMPLATE.replace(
    r"""    {%- set date_string = "26 Jul 2024" %}
""",
    r"""    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
""",
)

# The same as CHATML and with the white-space rules at work: indented blocks, comments, `~`.
CHATML_SPACED = """{# indented #}
    {% for message in messages %}
    {% if message.role == "user" %}
<|im_start|>user
{{ message["content"] }}<|im_end|>
    {% endif %}
{% endfor %}
{%- if add_generation_prompt -%}
    {{ "<|im_start|>" ~ 'assistant' }}
{{ "" }}
{% endif %}
"""

# Roles and contents.
CONVERSATIONS = [
    [("user", "One.")],
    [("system", " Be brief.\n"), ("user", "\tOne.  ")],
    [("user", "One."), ("assistant", " Two.\n"), ("user", "Three.")],
    [
        ("system", "Be brief."),
        ("user", "One."),
        ("assistant", "<think>\nHm, <think>twice?\n\n</think>\n\nTwo."),
        ("user", ""),
        ("assistant", "<think>\n\n</think>\n\nFour. </think> Five."),
        ("user", "\nSix."),
    ],
    [("user", "One."), ("assistant", "Two.</think>"), ("user", "3"), ("assistant", "\nFour.")],
    [("user", "1"), ("assistant", "\n<think>a\nb\n</think>c"), ("system", "Now "), ("user", "2")],
    [
        ("user", "1"),
        ("assistant", "<think>\nx\n</think>\n2"),
        ("user", "<tool_response>3</tool_response>"),
        ("assistant", "<think>\n\ny\n</think>\n\n4"),
    ],
]

TEMPLATES = [
    ("chatml", CHATML),
    ("chatml", CHATML_SPACED),
    ("qwen2", QWEN2_TEMPLATE),
    ("qwen2", QWEN25_TEMPLATE),
    ("qwen3", QWEN3_TEMPLATE),
    ("llama3", LLAMA3_TEMPLATE),
    ("llama3", LLAMA31_TEMPLATE),
    ("llama3", LLAMA32_TEMPLATE),
]


def write_templates():
    cases = []
    marker = "A message."
    for name, template in TEMPLATES:
        with tempfile.TemporaryDirectory() as folder:
            backend = models.BPE({"a": 0}, [])
            tokenizer = transformers.PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer(backend), bos_token="<|begin_of_text|>"
            )
            tokenizer.chat_template = template
            tokenizer.save_pretrained(folder)
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        case = {"format": name, "template": template}
        for thinking in (True, False):

            def render(content):
                # The date is given since Llama 3.2's template would ask for today's.
                return tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}],
                    add_generation_prompt=True,
                    enable_thinking=thinking,
                    tokenize=False,
                    date_string="26 Jul 2024",
                )

            prefix, suffix = render(marker).split(marker)
            padded = " \t\u0085\u00a0\u3000" + marker + "\n\x1f \u2003"
            case["thinking" if thinking else "no_thinking"] = [prefix, suffix]
            case["padded"] = padded
            case["padded_prompt"] = render(padded)
        exchange = tokenizer.apply_chat_template(
            [{"role": "user", "content": marker}, {"role": "assistant", "content": marker}],
            tokenize=False,
            date_string="26 Jul 2024",
        )
        case["exchange"] = exchange.split(marker)
        if template != CHATML_SPACED:  # which knows no assistant
            case["conversations"] = [
                {
                    "messages": messages,
                    "thinking": thinking,
                    "generation_prompt": prompt,
                    "text": tokenizer.apply_chat_template(
                        [dict(zip(("role", "content"), message)) for message in messages],
                        add_generation_prompt=prompt,
                        enable_thinking=thinking,
                        tokenize=False,
                        date_string="26 Jul 2024",
                    ),
                }
                for messages in CONVERSATIONS
                for thinking in (True, False)
                for prompt in (True, False)
            ]
        cases.append(case)
    write(
        OUT / "templates.json",
        {"made_by": f"transformers {transformers.__version__}", "cases": cases},
    )


if __name__ == "__main__":
    write_tokenizers()
    write_templates()
