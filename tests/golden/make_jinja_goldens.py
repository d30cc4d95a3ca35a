#!/usr/bin/env python3
"""Makes tests/golden/jinja/templates.json: what jinja2 renders for templates that use each feature of the
language, in the environment that transformers renders chat templates in. null: jinja2 refuses the template.
styles.json has whole chats, with tools and documents, in templates that combine features as published ones do.

Usage: make_jinja_goldens.py (needs `pip install jinja2`)"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/fuzz"))
from jinja_environment import environment  # noqa: E402

VARIABLES = {
    "s": " Zoë's <b>\u00a0\n", "e": "", "w": "one two  three", "n": 7, "f": 2.5, "t": True, "none": None,
    "l": [3, 1, 2], "words": ["b", "A", "c", "a"], "d": {"b": 1, "a": [1, "x", None], "items": 5},
    "rows": [{"k": "x", "v": 1, "in": {"z": 1}}, {"k": "y", "v": 2}, {"k": "x", "v": 3}],
}

EXPRESSIONS = """
1 + 2 * 3 - 4 // 3 % 2 ** 3 ** 2|-7 // 2, -7 % 3, 7 // -2, 7.5 // 2, -7.5 % 2|1 / 4, 4 / 2, 10 ** -2, 2 ** 62|1 / 0
1 ~ 2.0 ~ true ~ none ~ [1, 'a', none] ~ {'k': (1,)}|1e16, 1e15, 1.5e-5, 0.0001, 123456789.125, 1e300, -0.0, 100.0
0x1F, 0b11, 0o17, 1_000, 1_0.5|'a' 'b' "c"|'\\x41\\u00e9\\n\\t\\'\\\\q'|"it's", ["it's", 'a"b', "a'b\\"c"], ['é\\u2028\\x00']
1 < 2 < 3, 3 > 2 > 2, 1 == 1.0 == true, 'a' < 'b', [1, 2] < [1, 3]|1 < 'a'|not 1 == 2 and 3 or 4|0 or '' or none|1 and [] or 'x'
'a' if t else 'b'|'a' if not t|('a' if not t) is defined|1 in l, 4 not in l, 'o' in s, 'a' in d, 'b' in 'abc'|1 in 'a'|1 in undefined_name
w[0], w[-1], w[1:3], w[::-1], w[-5:], w[5:1:-2], w[100:], w[:-100]|l[0], l[-1], l[5], l[1:], l[::2]|s[4], s[:4]|s[99] is undefined
d.b, d['b'], d.nothing, d.items() | list, d['items'], d.a[1]|d.nothing.more|nothing|nothing.more|nothing()|none.x|d.get('z', 9), d.get('b'), d.get('z')
d.keys() | list, d.values() | list, d.items()|d | items | list|d | dictsort|d | length, w | length, s | length, l | count, undefined_name | length
s | trim, s.strip(), s.strip(' \\n'), s.lstrip(), s.rstrip()|s | upper, s | lower, w | title, w.title(), w | capitalize, s.capitalize()
w.split(), w.split(' '), w.split(' ', 1), w.rsplit(None, 1), w.rsplit(' ', 1), ''.split(), ''.split(',')|'a' .split('')|'a\\nb\\r\\nc\\n'.splitlines()
w.startswith('one'), w.startswith(('x', 'o')), w.endswith('three', 3), w.startswith('two', 4)|w.find('t'), w.find('t', 5), w.rfind('e'), w.find('z'), w.count('e'), w.index('o')
w.replace('o', '0'), w.replace('o', '0', 1), w | replace('e', ''), w | replace('e', 'E', 2), 'ab'.replace('', '-')|w.removeprefix('one'), w.removesuffix('e'), w.partition(' '), w.rpartition('x')
', '.join(words), words | join('-'), rows | join(',', attribute='k'), l | join|','.join(l)|'%s is %05.1f and %d%%' % ('a', 2.25, 7), '%(a)s' % {'a': 1}, '%s' | format('x')|'%d' % 'x'
'{} {1}'.format(1, 2)|'{0} {1} {x:>4}|{:5.2f}'.format(1, 2, x='q')|'{:>5}|{:<5}|{:^5}|{:05d}|{:,}|{:.1%}|{!r}'.format('a', 'b', 'c', 42, 12345, 0.5, 'x')
'a1'.isalnum(), '12'.isdigit(), ' '.isspace(), 'AB'.isupper(), 'ab'.islower(), ''.isalpha(), 'ab'.center(5, '*'), '7'.zfill(3), 'a'.ljust(3) ~ '|'
d | tojson, rows | tojson, s | tojson, f | tojson, [1.0, true, none] | tojson|d | tojson(indent=2)|d | tojson(separators=(',', ':')), d | tojson(sort_keys=true), 'é\\U0001F600' | tojson(ensure_ascii=true)|{1: 2, none: 3} | tojson|undefined_name | tojson|[] | tojson(indent=1), {} | tojson(indent=1)
undefined_name | default('x'), '' | default('x'), '' | d('x', true), none | default('x'), none | default('x', boolean=true)|'12' | int, 'x' | int, 'x' | int(5), '4.7' | int, ' 9 ' | int, '1f' | int(base=16), 2.9 | int, none | int
'1.5' | float, 'x' | float, 'inf' | float, 2 | float|-3 | abs, 2.5 | round, 3.5 | round, 2.345 | round(2), 2.1 | round(0, 'ceil'), 2.9 | round(method='floor'), 3 | round
l | first, l | last, [] | first, w | first, d | first, l | sort, l | sort(reverse=true), words | sort, words | sort(case_sensitive=true)|rows | sort(attribute='v', reverse=true) | map(attribute='v') | list|rows | sort(attribute='k,v') | map(attribute='v') | list|[1, 'a'] | sort
[1, 2, 1, 'A', 'a'] | unique | list, l | reverse | list, w | reverse, l | min, l | max, words | max, [] | min, l | sum, rows | sum(attribute='v'), [[1], [2]] | sum(start=[])
rows | map(attribute='k') | list, rows | map(attribute='in.z', default='-') | list, words | map('upper') | join, l | map('string') | list, l | map('nofilter') | list|l | select | list, l | select('odd') | list, l | reject('gt', 1) | list
rows | selectattr('v', '>', 1) | map(attribute='v') | list, rows | rejectattr('k', 'equalto', 'x') | list | length, rows | selectattr('in') | list | length|rows | groupby('k')|[1, 2, 3, 4, 5] | batch(2, 0) | list|l | list, 'ab' | list, d | list, 5 | string ~ 1
'a\\n\\nb\\nc' | indent, 'a\\nb' | indent(2, true), 'a\\n\\nb' | indent('>>', blank=true)|'<a href="x">' | e, '<' | safe ~ '<', ('<' | safe) + '<'|w | wordcount, 'a b&c/ü' | urlencode, 'ab' | center(6)
n is number, n is integer, f is float, t is boolean, t is true, t is false, n is odd, n is even, n is divisibleby 7, n is divisibleby(3)|w is string, l is iterable, n is iterable, l is sequence, d is mapping, l is mapping, none is none, undefined_name is undefined, d is callable, range is callable
n is eq 7, n is ne 7, n is lt(8), n is ge 7, 1 is in l, 1 is not in l, l is sameas l, 1 is sameas 1.0, 'A' is upper, 'a' is lower, 'upper' is filter, 'odd' is test|n is nosuchtest|n | nosuchfilter
range(3) | list, range(5, 1, -2) | list, range(0), range(200000)|range(3)[1], range(5)[1:3] | list, 2 in range(3)|dict(a=1, **{'b': 2}), dict([('x', 1)]), {'a': 1, 'a': 2}|{[]: 1}|dict({'a': 1}, b=2)
l.append(4)|d.update({'a': 1})|d.pop('a')|l.index(2), l.count(1), (1, 2).index(2)|l + [4], (1,) + (2,), [0] * 3, 'ab' * 2, 2 * 'x', 'x' * -1|l + (1,)|'a' + 1|-l|- -3, +3, -2.5, not none|-2 ** 2, 2 ** -1
raise_exception('no')|namespace(a=1).a, namespace(a=1).b|namespace(_a=1)|strftime_now('%d %b %Y, %A, %j, %H:%M:%S %p, %-d, %y, %m %%')|l.0, rows.0.k, d.a.1|(1, 2, 3), (1,), ()|[1, 2,], {'a': 1,}|1 if 2 if 0 else 3 else 4
""".strip().split("\n")

TEMPLATES = [
    "{% for x in l %}{{ loop.index }}/{{ loop.length }}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}{{ loop.index0 }}{{ loop.revindex0 }};{% endfor %}",
    "{% for x in l %}{{ loop.previtem }}-{{ x }}-{{ loop.nextitem }} {{ loop.cycle('a', 'b') }}{{ loop.changed(x > 1) }} {% endfor %}",
    "{% for x in [] %}a{% else %}none{% endfor %}{% for k, v in d.items() %}{{ k }}={{ v }},{% endfor %}",
    "{% for x in range(9) if x is odd %}{{ loop.index }}:{{ x }}{% if loop.last %}!{% endif %} {% endfor %}",
    "{% for x in range(9) %}{% if x == 2 %}{% continue %}{% endif %}{% if x > 4 %}{% break %}{% endif %}{{ x }}{% endfor %}",
    "{% for x in range(9) if x > n - 4 %}{% set n = 99 %}{{ loop.last }}{{ x }}{% endfor %}",
    "{% for x in range(2) %}{% continue %}{% else %}else{% endfor %}{% for x in [1] %}{% break %}{% else %}E{% endfor %}",
    "{% for x in [[1, [2, [3]]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}@{{ loop.depth }}{% endif %}{% endfor %}",
    "{% set x = 1 %}{% for i in l %}{{ x }}{% set x = i %}{{ x }}{% endfor %}{{ x }}",
    "{% set ns = namespace(c=0) %}{% for i in l %}{% set ns.c = ns.c + i %}{% endfor %}{{ ns.c }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set (c, (q, r)) = [3, [4, 5]] %}{{ c }}{{ r }}{% set x %} B {{ a }} {% endset %}[{{ x }}]",
    "{% set x | upper | trim %} abc {% endset %}[{{ x }}]{% filter upper %}a{{ 1 }}b{% endfilter %}{% filter replace('a', 'b') | title %}banana{% endfilter %}",
    "{% macro f(a, b=2, c=a) %}{{ a }}{{ b }}{{ c }}|{% endmacro %}{{ f(1) }}{{ f(1, c=3) }}{{ f() }}{{ f(1, 2, 3) }}",
    "{% macro f(a) %}{{ a }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 2, 3, x=4) }}",
    "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(1, 2) }}", "{% macro f(a) %}{{ a }}{% endmacro %}{{ f(b=2) }}",
    "{% macro f() %}<{{ caller(5) }}>{% endmacro %}{% call(x) f() %}{{ x + n }}{% endcall %}",
    "{% macro f() %}{{ y }}{% endmacro %}{{ f() }}{% set y = 1 %}{{ f() }}{% for y in l %}{{ f() }}{% endfor %}",
    "{% macro fact(k) %}{% if k > 1 %}{{ k }}*{{ fact(k - 1) }}{% else %}1{% endif %}{% endmacro %}{{ fact(5) }}",
    "{% if e %}a{% elif n > 9 %}b{% elif f %}c{% else %}d{% endif %}{% if e %}{% else %}x{% endif %}",
    "{% with a = 1, b = n %}{{ a + b }}{% endwith %}{{ a }}{% print 1, 'x' %}",
    "a {% generation %} b {{ n }}{% set q = 1 %} {% endgeneration %} c{{ q }}",
    "{% raw %}{{ x }} {% if %}{% endraw %}  {%- raw -%}  a {%- endraw -%}  b",
    "  {% if t %}\n  x\n  {% endif %}\n y {{ n }}\n\n{% if t %} z{% endif %}\n", "a\n  {%- if t -%}\n  x\n  {%- endif -%}\n y", "a\n  {%+ if t +%}\n  x\n  {%+ endif +%}\n y",
    "a {#- c -#} b\n  {# d #}\n c {{- n -}} d", "{{ '{{' }}{{ \"%}\" }}{{ {'a': {'b': 1}}['a']['b'] }}", "x\r\ny\rz\n", "{%- for x in l -%}\n  {{ x }},\n{%- endfor %}",
    "{% if t: %}x{% endif %}", "{{ 1 | }}", "{{ 1 1 }}", "{% for x in %}{% endfor %}", "{% if %}{% endif %}", "{% endif %}", "{% for x in l %}", "{{ [1, 2 }}", "{{ 'a }}", "{# a", "{% raw %}",
    "{% unknown %}", "{% break %}", "{% set x.y = 1 %}", "{% set n = {} %}{% set n.y = 1 %}", "{% set true = 1 %}", "{% for loop in l %}{% endfor %}", "{% set a, b = [1] %}", "{% for a, b in l %}{% endfor %}",
    # Strings that are safe escape others. Filters that do not exist are errors unless an if decides about them.
    "{{ ('<'|safe).join(['<', '>' | safe]) }}{{ ('a'|safe).replace('a', '<') }}{{ ('<'|safe) | replace('<', '>') + '<' }}{{ ('a'|safe).ljust(3, '<') }}",
    "{{ ('%s %r %5s|%d'|safe) % ('<', '>', '&' | safe, 1) }}{{ ('{} {!s} {x:>5}'|safe).format('<', '<' | safe, x='&') }}{{ ('%s'|safe) | format('<') }}",
    "{{ [s | safe | upper, s | safe | trim, (s | safe).split()[0], (s | safe)[4:] * 2, (s | safe)[5], s | safe | title, s | safe | list] }}",
    "{% macro f(a, b=1) %}{{ kwargs }}{% endmacro %}{{ [f.name, f.arguments, f['catch_kwargs'], f.catch_varargs, f.caller, f.more] }}", "{% macro f(a, a) %}{% endmacro %}",
    "{{ 1 | nofilter }}", "{% if e %}{{ 1 | nofilter }}{{ 1 is notest }}{% endif %}x", "{% if t %}{{ 1 is notest }}{% endif %}", "{{ 1 | nofilter if e else 2 }}",
    "{% for x in [] %}{{ x | nofilter }}{% endfor %}", "{% if e %}{% for x in l %}{{ x is notest }}{% endfor %}{% endif %}", "{% for x in [] if x is notest %}{% endfor %}",
    "{% if e %}{% filter nofilter %}{% endfilter %}{% endif %}", "{% if e %}{% set x | nofilter %}{% endset %}{% endif %}", "a{#",
    "{{ 1 is odd is even }}", "{{ f(a=1, 2) }}", "{{ l[1:2, 3] }}", "{{ 5 }}{% set _x = 1 %}{{ _x }}", "{{ l.__class__ }}{{ ''.__class__.__mro__ }}", "{{ loop }}", "{{ d.__class__.x }}",
]


TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Tells the weather.\nFor \"cities\".", "parameters": {
        "type": "object", "required": ["city"], "properties": {
            "city": {"type": "string", "description": "A city, e.g. Z\u00fcrich"}, "days": {"type": ["integer", "null"], "default": 1},
            "unit": {"type": "string", "enum": ["C", "F"]}, "box": {"type": "object", "properties": {"x": {"type": "number"}}},
            "tags": {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "boolean"}]}}}}}},
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}}},
]
CALL = {"role": "assistant", "content": "", "tool_calls": [
    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern", "days": 2, "tags": [True, None, 1.5]}}},
    {"id": "c2", "type": "function", "function": {"name": "now", "arguments": {}}}]}
RESULTS = [{"role": "tool", "tool_call_id": "c1", "content": "22 \u00b0C"}, {"role": "tool", "tool_call_id": "c2", "content": "12:00"}]
ASK, SYSTEM = {"role": "user", "content": "How warm is it?\n"}, {"role": "system", "content": " Be kind. "}
THOUGHTS = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nWarm.", "reasoning_content": "Hm."}
CHATS = {
    "plain": {"messages": [ASK]},
    "turns": {"messages": [SYSTEM, ASK, THOUGHTS, ASK], "enable_thinking": True},
    "tools": {"messages": [SYSTEM, ASK, CALL, *RESULTS, THOUGHTS, ASK], "tools": TOOLS, "enable_thinking": False},
    "call last": {"messages": [ASK, CALL], "tools": TOOLS[:1], "add_generation_prompt": False},
    "documents": {"messages": [ASK], "documents": [{"title": "A", "text": "One.\nTwo."}, {"title": "B", "text": "<x> & \"y\""}]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "See "}, {"type": "image"}, "bare", {"type": "text", "text": "it."}]}]},
    "wrong": {"messages": [RESULTS[0]]},
}
STYLES = {
    # Recursive macros write the types of tools; maps are sorted.
    "types": """{%- macro type_of(s, level=0) -%}
{%- if s.enum %}{{ s.enum | map('tojson') | join(' | ') }}
{%- elif s.type is defined and s.type is sequence and s.type is not string %}{{ s.type | join('?') }}
{%- elif s.type == 'array' %}{{ type_of(s['items'], level) }}[]
{%- elif s.type == 'object' and s.properties %}{ {% for k, v in s.properties | dictsort %}{{ k ~ ('' if k in (s.required or []) else '?') }}: {{ type_of(v, level=level + 1) }}{{ '; ' if not loop.last }}{% endfor %} }
{%- elif s.anyOf or s.oneOf %}{% for v in s.anyOf or s.oneOf %}{{ type_of(v) }}{% if not loop.last %} or {% endif %}{% endfor %}
{%- else %}{{ s.type | default('any', true) | upper }}{% endif -%}
{%- endmacro -%}
{{ bos_token }}{% for t in tools or [] %}{% set f = t.function or t %}
/// {{ f.description | replace('\n', '\n/// ') }}
fn {{ f.name }}({{ type_of(f.parameters) if f.parameters.properties }})
{% endfor %}{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content | trim }}{% endif %}{% for c in m.tool_calls | default([]) %}{{ c.function.name }}{{ c.function.arguments | tojson(indent=1) }}{% endfor %}{% endfor %}""",
    # Thoughts of earlier turns are dropped; runs of results share a turn.
    "thoughts": """{%- set ns = namespace(last=-1, open=false) -%}
{%- for m in messages[::-1] %}{% if m.role == 'user' and ns.last < 0 %}{% set ns.last = messages | length - loop.index %}{% break %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first %}{{ raise_exception('A result without a call: ' ~ m.tool_call_id) }}{% endif -%}
{%- if loop.previtem.role != 'tool' %}<|results|>{% endif %}<r>{{ m.content }}</r>{% if loop.last or loop.nextitem.role != 'tool' %}<|end|>{% endif -%}
{%- continue -%}{%- endif -%}
{%- set text = m.content if m.content is string else '' -%}
{%- if '</think>' in text -%}
{%- set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set text = text.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}
<|{{ m.role }}|>{% if loop.index0 > ns.last and thought %}<t>{{ thought }}</t>{% endif %}{% generation %}{{ text.strip() }}{% endgeneration %}
{%- for c in m.tool_calls or [] %}{{ '\n' if loop.first }}<c {{ c.function.name }}>{% for k, v in c.function.arguments.items() %}<a {{ k }}>{{ v if v is string else v | tojson(ensure_ascii=False) }}</a>{% endfor %}</c>{% endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{{ '<t></t>' if enable_thinking is defined and not enable_thinking }}{% endif -%}""",
    # Documents and a preamble; parts of contents; call blocks.
    "documents": """{%- macro turn(name) %}<{{ name }}>{{ caller(name | length) }}</{{ name }}>
{% endmacro -%}
{%- macro text_of(content) -%}{% if content is string %}{{ content }}{% else %}{% for p in content %}{% if p is mapping and p.type == 'text' %}{{ p.text }}{% elif p is mapping %}[{{ p.type }}]{% elif p is string %}'{{ p }}'{% endif %}{% endfor %}{% endif %}{%- endmacro -%}
{%- if documents %}{% call(n) turn('docs') %}{% for d in documents %}

{{ n }}.{{ loop.index }} {{ d.title | e }}: {{ d.text | indent(2, true) }}{{ d | tojson(separators=(',', ':'), sort_keys=true) }}{% endfor %}{% endcall %}{% endif -%}
{%- for role, group in messages | selectattr('content') | list | groupby('role') %}{{ role }}={{ group | length }};{% endfor %}
{% for m in messages if m.role != 'system' -%}
{% call(n) turn(m.role) %}{{ n }} {{ text_of(m.content) | trim }}{% endcall %}
{%- endfor %}{{ 'assistant:' if add_generation_prompt }}""",
    # Dates, formats, slices and string methods.
    "formats": """{{ strftime_now('%d %B %Y') }}|{{ '%-9s|%4d|%.1f' | format('ab', 7, 2.25) }}|{{ '{:>6}|{:<4}|{!r}'.format('x', 3, 'q') }}
{% set roles %}{% for m in messages %}{{ m.role[:1].upper() }}{% endfor %}{% endset %}{{ roles }} {{ roles[::-1] }} {{ roles[-2:] }} {{ messages | map(attribute='role') | unique | sort | join('/') }}
{% for m in messages | rejectattr('role', 'in', ['system', 'tool']) -%}
{{ loop.index }}/{{ loop.length }} {{ loop.cycle('odd', 'even') }} {{ m.role.removeprefix('us').partition('s') | list }} {{ (m.content | string)[:12].splitlines() }} {{ m.get('tool_calls', []) | length }} {{ m is mapping }} {{ m.items() | map('first') | list }}
{% endfor %}{{ ((tools or []) | map(attribute='function.name') | list) + ['end'] }}{{ messages[-1:] | map(attribute='role') | first }} {{ (messages | last).content is defined and messages[0].content != none }}{{ dict(a=1, **{'b': [1, 2][::-1]}) }}""",
}


def write_styles(made):
    texts = {}
    for name, source in STYLES.items():
        template = made.from_string(source)
        texts[name] = {}
        for chat, variables in CHATS.items():
            try:
                texts[name][chat] = template.render(**{"bos_token": "<s>", "tools": None, "documents": None,
                                                       "add_generation_prompt": True, **variables})
            except Exception:
                texts[name][chat] = None
    file = ROOT / "tests/golden/jinja/styles.json"
    file.write_text(json.dumps({"chats": CHATS, "styles": STYLES, "texts": texts}, ensure_ascii=False, indent=1) + "\n")
    print(len(STYLES), "styles,", sum(text is None for each in texts.values() for text in each.values()), "chats refused")


def main():
    made = environment()
    write_styles(made)
    cases = list(TEMPLATES)
    for line in EXPRESSIONS:
        # A bar with spaces around it is a filter; one without separates expressions.
        for expression in line.replace(" | ", "\0").split("|"):
            cases.append("{{ [" + expression.replace("\0", " | ") + "] }}")
    results = []
    for template in dict.fromkeys(cases):
        try:
            text = made.from_string(template).render(**VARIABLES)
        except Exception:
            text = None
        results.append([template, text])
    file = ROOT / "tests/golden/jinja/templates.json"
    file.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(result, ensure_ascii=False) for result in results)
    variables = json.dumps(VARIABLES, ensure_ascii=False)
    file.write_text(f'{{"variables": {variables},\n"cases": [\n{lines}\n]}}\n')
    print(len(results), "cases,", sum(text is None for _, text in results), "refused")


if __name__ == "__main__":
    main()
