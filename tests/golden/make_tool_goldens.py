#!/usr/bin/env python3
"""Makes tests/golden/jinja/tools.json: the prompts that transformers' apply_chat_template makes of chats with tools,
in one template for each way in which families write calls. Templates have the marks of published ones and
the features that those use. null: the template refuses the chat.

Usage: make_tool_goldens.py (needs `pip install transformers`; made with 5.24)"""

import copy
import datetime
import json
import pathlib

import tokenizers
import transformers
from transformers.utils import chat_template_utils

FOLDER = pathlib.Path(__file__).resolve().parent / "jinja"

WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells the weather.\nFor \"cities\" & <places>.", "parameters": {
    "type": "object", "required": ["city"], "properties": {
        "city": {"type": "string", "description": "A city, e.g. Zürich"}, "days": {"type": ["integer", "null"], "default": 1},
        "unit": {"type": "string", "enum": ["C", "F"]}, "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3}}}}}
NOW = {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}}


def call(id, name, **arguments):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


USER, AGAIN = {"role": "user", "content": "How warm is it in Zürich?\n"}, {"role": "user", "content": "And when is it?"}
ANSWER = {"role": "assistant", "content": "It is 22 °C.", "reasoning_content": "That is warm."}
ROUND = [USER, {"role": "assistant", "content": None, "tool_calls": [call("a1b2c3d4e", "weather", city="Zürich \"ZH\"", days=2, tags=["x", "<y>"])]},
         {"role": "tool", "tool_call_id": "a1b2c3d4e", "name": "weather", "content": "{\"warm\": 22.5}\n"}, ANSWER]
CHATS = {
    "first": {"messages": [USER], "tools": [WEATHER, NOW]},
    "result": {"messages": [{"role": "system", "content": " Be kind. "}, *ROUND[:3]], "tools": [WEATHER]},
    "second": {"messages": [*ROUND, AGAIN], "tools": [NOW]},
    "parallel": {"messages": [USER, {"role": "assistant", "content": "Both.", "reasoning_content": "Two calls.", "tool_calls": [
        call("a00000001", "weather", city="Bern", days=None), call("a00000002", "now")]},
        {"role": "tool", "tool_call_id": "a00000001", "name": "weather", "content": "cold"},
        {"role": "tool", "tool_call_id": "a00000002", "name": "now", "content": "12:00"}], "tools": [NOW]},
    "no tools": {"messages": [{"role": "system", "content": "Short."}, *ROUND[:1], ANSWER, AGAIN]},
}

TEMPLATES = {
    # Results share a turn; thoughts before the last question are dropped.
    "hermes": r"""{%- set ns = namespace(asked=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor -%}
{%- set rules = messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join('\n') -%}
{%- if rules or tools %}<|im_start|>system
{{ rules }}{% if tools %}
<tools>{% for t in tools %}
{{ t | tojson }}{% endfor %}
</tools>
Call by <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>{% endif %}<|im_end|>
{% endif -%}
{%- for m in messages if m.role != 'system' -%}
{%- if m.role == 'tool' -%}
{{ '<|im_start|>user' if loop.previtem.role != 'tool' }}
<tool_response>
{{ m.content }}
</tool_response>{{ '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
{%- else %}<|im_start|>{{ m.role }}
{% if m.reasoning_content is string and loop.index0 > ns.asked %}<think>{{ m.reasoning_content.strip('\n') }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{{ '<think></think>' if enable_thinking is defined and enable_thinking is false }}{% endif -%}""",
    # A macro writes what it does not know of a schema; arguments are elements.
    "coder": r"""{%- macro other(fields, known) -%}
{%- for k, v in fields | items if k not in known %}<{{ k }}>{{ v | tojson | safe if v is mapping or v is iterable and v is not string else v }}</{{ k }}>{% endfor -%}
{%- endmacro -%}
{%- if tools is defined and tools is not none and tools | length > 0 %}<|im_start|>system
<tools>
{%- for t in tools | map(attribute='function') %}
<function>
<name>{{ t.name }}</name>{{ '\n<description>' ~ t.description | trim ~ '</description>' if t.description }}
{%- for k, v in (t.parameters.properties or {}).items() %}
<parameter name="{{ k }}" type="{{ v.type | string }}">{{ other(v, ['type']) }}</parameter>
{%- endfor %}
{{ other(t.parameters, ['type', 'properties']) }}</function>
{%- endfor %}
</tools>
Call by <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call><|im_end|>
{% endif -%}
{%- for m in messages -%}
<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{{ '<tool_response>' ~ m.content ~ '</tool_response>' if m.role == 'tool' else m.content | trim }}
{%- if m.tool_calls is defined and m.tool_calls is iterable %}{% for c in m.tool_calls | map(attribute='function') %}
<tool_call>
<function={{ c.name }}>
{%- for k, v in c.arguments | items %}
<parameter={{ k }}>
{{ v if v is string else v | tojson }}
</parameter>
{%- endfor %}
</function>
</tool_call>{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    # Tools without escapes; lines and blanks by dashes; keys and values.
    "glm": r"""[gMASK]<sop>
{%- if tools %}<|system|>
{% for t in tools -%}
    {{ t | tojson(ensure_ascii=False) }}
{% endfor -%}
Call by <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
{%- endif -%}
{%- macro plain(c) -%}
    {%- if c is string %}{{ c }}{% elif c is iterable and c is not mapping %}{% for p in c if p.type == 'text' %}{{ p.text }}{% endfor %}{% endif -%}
{%- endmacro -%}
{%- for m in messages -%}
    {%- set said = plain(m.content) -%}
    {%- if m.role == 'tool' -%}
        {{ '<|observation|>' if loop.first or messages[loop.index0 - 1].role != 'tool' }}
<tool_response>{{ said }}</tool_response>
    {%- else -%}
        <|{{ m.role }}|>
{{ '<think></think>\n' if m.role == 'assistant' }}{{ said.strip() }}
        {%- if m.role == 'user' and enable_thinking is defined and not enable_thinking and not said.endswith('/nothink') %}/nothink{% endif -%}
        {%- for c in m.get('tool_calls', []) -%}
            {%- set f = c.function or c %}
<tool_call>{{ f.name }}
{% for k, v in f.arguments.items() -%}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor -%}
</tool_call>
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{{ '\n<think></think>' if enable_thinking is defined and not enable_thinking }}{% endif -%}""",
    # Tools stand before the last question; ids have nine characters; turns alternate.
    "mistral": r"""{{- bos_token -}}
{%- set asked = (messages | selectattr('role', 'eq', 'user') | list)[-1] -%}
{%- set turns = namespace(count=0, rules='') -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{%- set turns.rules = m.content ~ '\n\n' -%}
{%- elif m.role == 'user' or m.role == 'assistant' and not m.tool_calls -%}
{%- if (m.role == 'user') == (turns.count % 2 == 1) %}{{ raise_exception('Two turns of ' ~ m.role) }}{% endif -%}
{%- set turns.count = turns.count + 1 -%}
{%- endif -%}
{%- if m.role == 'user' -%}
{%- if tools and m == asked -%}
[AVAILABLE_TOOLS][{% for t in tools %}{"type": "function", "function": { {%- for k, v in t.function.items() -%}
"{{ k }}": {{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}}}{% if not loop.last %}, {% endif %}{% endfor %}][/AVAILABLE_TOOLS]
{%- endif -%}
[INST]{{ turns.rules if loop.last }}{{ m.content }}[/INST]
{%- elif m.tool_calls is defined -%}
[TOOL_CALLS][
{%- for c in m.tool_calls -%}
{%- if c.id is undefined or c.id | length != 9 %}{{ raise_exception('An id has 9 characters') }}{% endif -%}
{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ ', ' if not loop.last else ']' ~ eos_token }}
{%- endfor -%}
{%- elif m.role == 'assistant' -%}{{ m.content + eos_token }}
{%- elif m.role == 'tool' -%}[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]
{%- endif -%}
{%- endfor -%}""",
    # Today's date; tools with an indent in the first question; one call in a turn; a role for results.
    "json": r"""{{- bos_token -}}
{%- macro turn(role) -%}<|start_header_id|>{{ role }}<|end_header_id|>

{{ caller() | trim }}<|eot_id|>{%- endmacro -%}
{%- if today is not defined %}{% set today = strftime_now('%d %b %Y') if strftime_now is defined else '?' %}{% endif -%}
{%- call turn('system') %}Today: {{ today }}{{ '\nEnvironment: ipython' if tools is not none }}
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}{% endcall -%}
{%- set told = namespace(tools=tools is none) -%}
{%- for m in messages if m.role != 'system' -%}
{%- if 'tool_calls' in m -%}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('One call at a time') }}{% endif -%}
{%- call turn('assistant') %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}{% endcall -%}
{%- elif m.role == 'tool' -%}
{%- call turn('ipython') %}{{ m.content | tojson if m.content is mapping or m.content is iterable and m.content is not string else m.content }}{% endcall -%}
{%- else -%}
{%- call turn(m.role) -%}
{%- if not told.tools -%}
{%- set told.tools = true -%}
Call by {"name": NAME, "parameters": OBJECT}.
{% for t in tools %}{{ t | tojson(indent=4) }}

{% endfor -%}
{%- endif -%}
{{ m.content }}{% endcall -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}""",
    # Macros write types; messages have channels; a result has the name of the last call.
    "harmony": r"""{%- macro kind(p) -%}
{%- if p.enum %}"{{ p.enum | join('" | "') }}"
{%- elif p.type == 'array' %}{{ kind(p['items']) if p['items'] else 'any' }}[]
{%- elif p.type is iterable and p.type is not string %}{{ p.type | join(' | ') }}
{%- else %}{{ {'integer': 'number', 'boolean': 'bool'}.get(p.type, p.type | default('any')) }}{% endif -%}
{%- endmacro -%}
{%- macro say(head, text, end='<|end|>') %}<|start|>{{ head }}<|message|>{{ text }}{{ end }}{% endmacro -%}
{{ say('system', 'Date: ' ~ strftime_now('%Y-%m-%d') ~ '\nReasoning: ' ~ reasoning_effort | default('medium')) }}
{%- set rules -%}
{%- for m in messages if m.role in ('system', 'developer') %}{{ m.content }}{% endfor -%}
{%- if tools %}
namespace functions {
{% for t in tools %}{% set f = t.function %}
// {{ f.description }}
type {{ f.name }} = ({% if f.parameters.properties %}_: {
{% for k, p in f.parameters.properties.items() %}
{%- if p.description %}// {{ p.description }}
{% endif %}{{ k ~ ('?' if k not in (f.parameters.required or [])) }}: {{ kind(p) }},{{ ' // default: ' ~ p.default | tojson if p.default is defined }}
{% endfor %}}{% endif %}) => any;
{% endfor %}}{% endif -%}
{%- endset -%}
{{ say('developer', rules) if rules }}
{%- set last = namespace(call=none) -%}
{%- for m in messages -%}
{%- if m.role == 'user' %}{{ say('user', m.content) }}
{%- elif m.role == 'tool' %}
{%- if last.call is none %}{{ raise_exception('A result without a call') }}{% endif -%}
{{ say('functions.' ~ last.call ~ ' to=assistant<|channel|>commentary', m.content | tojson) }}
{%- elif m.role == 'assistant' and 'tool_calls' in m %}
{%- if m.thinking and m.content %}{{ raise_exception('Text and thoughts beside a call') }}{% endif -%}
{{ say('assistant<|channel|>analysis', m.thinking or m.content) if m.thinking or m.content }}
{%- for c in m.tool_calls %}{% set last.call = c.function.name %}{{ say('assistant to=functions.' ~ c.function.name ~ '<|channel|>commentary json', c.function.arguments | tojson, '<|call|>') }}{% endfor -%}
{%- elif m.role == 'assistant' %}{{ say('assistant<|channel|>final', m.content, '<|end|>' if not loop.last or add_generation_prompt else '<|return|>') }}
{%- endif -%}
{%- endfor -%}
{{ '<|start|>assistant' if add_generation_prompt }}""",
    # One expression a piece; a flag tells whether a result came last.
    "deepseek": r"""{%- set at = namespace(result=false, rules=[]) -%}
{%- for m in messages if m.role == 'system' %}{% set at.rules = at.rules + [m['content']] %}{% endfor -%}
{%- if tools is defined and tools is not none -%}
{%- for t in tools %}{% set at.rules = at.rules + ['### ' + t['function']['name'] + '\n' + t.function.description + '\n' + (t.function.parameters | tojson)] %}{% endfor -%}
{%- endif -%}
{{- bos_token + at.rules | join('\n\n') -}}
{%- for m in messages -%}
{%- if m['role'] == 'user' -%}{{- '<｜User｜>' + m['content'] -}}
{%- elif m['role'] == 'tool' -%}{{- '<｜tool▁output▁begin｜>' ~ m['content'] ~ '<｜tool▁output▁end｜>' -}}
{%- elif m['role'] == 'assistant' -%}
{%- if not at.result -%}{{- '<｜Assistant｜></think>' -}}{%- endif -%}
{{- m['content'].split('</think>', 1)[-1] -}}
{%- for c in m['tool_calls'] or [] -%}
{{- '<｜tool▁calls▁begin｜>' if loop.first -}}
{{- '<｜tool▁call▁begin｜>' + c['function']['name'] + '<｜tool▁sep｜>' + c['function']['arguments'] | tojson + '<｜tool▁call▁end｜>' -}}
{{- '<｜tool▁calls▁end｜>' if loop.last -}}
{%- endfor -%}
{{- '<｜end▁of▁sentence｜>' -}}
{%- endif -%}
{%- set at.result = m['role'] == 'tool' -%}
{%- endfor -%}
{%- if add_generation_prompt and not at.result -%}{{- '<｜Assistant｜>' ~ ('<think>' if thinking else '</think>') -}}{%- endif -%}""",
    # Tools without blanks; names of calls have numbers.
    "kimi": r"""{%- macro head(role, name) -%}<|im_{{ role if role in ['user', 'assistant'] else 'system' }}|>{{ name }}<|im_middle|>{%- endmacro -%}
{%- if tools %}{{ head('tools', 'tool_declare') }}{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{% endif -%}
{%- set number = namespace(next=0) -%}
{%- for m in messages -%}
{{ head(m.role, m.get('name') or m.role) }}{{ '## ' ~ m.get('tool_call_id', '') ~ '\n' if m.role == 'tool' }}{{ m.content }}
{%- if m.get('tool_calls') %}<|tool_calls_section_begin|>
{%- for c in m.tool_calls -%}
<|tool_call_begin|>functions.{{ c.function.name }}:{{ number.next }}<|tool_call_argument_begin|>{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}<|tool_call_end|>
{%- set number.next = number.next + 1 -%}
{%- endfor -%}
<|tool_calls_section_end|>{% endif %}<|im_end|>
{%- endfor -%}
{{ head('assistant', 'assistant') if add_generation_prompt }}""",
    # Today's date in words; tools with an indent in a turn of their own.
    "granite": r"""{%- macro turn(role, text) %}<|start_of_role|>{{ role }}<|end_of_role|>{{ text }}<|end_of_text|>
{% endmacro -%}
{%- if messages[0].role != 'system' %}{{ turn('system', 'Today is ' ~ strftime_now('%B %d, %Y') ~ ('. Call by <|tool_call|>[OBJECTS]' if tools else '')) }}{% endif -%}
{%- if tools %}{{ turn('available_tools', tools | map(attribute='function') | list | tojson(indent=4)) }}{% endif -%}
{%- for m in messages -%}
{{ turn({'tool': 'tool_response'}.get(m.role, m.role), m.content | default('', true) ~ ('<|tool_call|>' ~ m.tool_calls | map(attribute='function') | list | tojson if m.tool_calls)) }}
{%- endfor -%}
{{ '<|start_of_role|>assistant<|end_of_role|>' if add_generation_prompt }}""",
    # Calls as Python writes them.
    "lfm": r"""{{- bos_token -}}
{%- macro python(v) -%}
{%- if v is none %}None{% elif v is boolean %}{{ v | string }}{% elif v is string or v is mapping %}{{ v | tojson }}
{%- elif v is iterable %}[{% for one in v %}{{ python(one) }}{{ ', ' if not loop.last }}{% endfor %}]{% else %}{{ v }}{% endif -%}
{%- endmacro -%}
{%- set parts = namespace(rules='') -%}
{%- for m in messages if m.role == 'system' %}{% set parts.rules = parts.rules ~ m.content %}{% endfor -%}
{%- if tools %}{% set parts.rules = parts.rules ~ '<|tool_list_start|>[' ~ tools | map('tojson') | join(', ') ~ ']<|tool_list_end|>' %}{% endif -%}
{%- if parts.rules %}{{ '<|im_start|>system\n' ~ parts.rules ~ '<|im_end|>\n' }}{% endif -%}
{%- for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}
{% if m.tool_calls %}<|tool_call_start|>[
{%- for c in m.tool_calls %}{{ c.function.name }}(
{%- for k, v in c.function.arguments.items() %}{{ k }}={{ python(v) }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor -%}
]<|tool_call_end|>{% endif %}{{ '<|tool_response_start|>' ~ m.content ~ '<|tool_response_end|>' if m.role == 'tool' else m.content }}<|im_end|>
{% endfor -%}
{{ '<|im_start|>assistant\n' if add_generation_prompt }}""",
}


class Day(datetime.datetime):
    """kvzap's today."""

    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


def bodies():
    """Chats as bodies of requests, where arguments are text."""
    chats = json.loads(json.dumps(CHATS))
    for chat in chats.values():
        for message in chat["messages"]:
            for one in message.get("tool_calls", []):
                one["function"]["arguments"] = json.dumps(one["function"]["arguments"], ensure_ascii=False)
    return chats


def prompt_of(template, chat):
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
                                                     bos_token="<s>", eos_token="</s>")
    # The server joins the parts of contents, and drops fields that are null.
    messages = [{**message, "content": message["content"] or ""} for message in copy.deepcopy(chat["messages"])]
    for message in messages:
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning"] = message["reasoning_content"]
    try:
        return tokenizer.apply_chat_template(messages, tools=chat.get("tools"), chat_template=template, tokenize=False,
                                             add_generation_prompt=True, enable_thinking=False, thinking=False)
    except Exception as error:
        print(f"refused: {error}")
        return None


def main():
    chat_template_utils.datetime = Day
    prompts = {style: {name: prompt_of(template, chat) for name, chat in CHATS.items()} for style, template in TEMPLATES.items()}
    golden = {"chats": bodies(), "templates": TEMPLATES, "prompts": prompts}
    (FOLDER / "tools.json").write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
