#!/usr/bin/env python3
"""Compares kvzap with jinja2, in the environment and with the variables that transformers gives a template.

One half of the cases are published templates, mutated; templates that one of the two refuses are not compared.
The other half are random templates of the language: both give the same text, or both refuse the template.
Without jinja2 the test is skipped.

With --templates, the cases are all *.jinja files of a folder, each with all chats of template_chats.py: both give the
same text, or both refuse the chat. The other side is transformers' own environment, if transformers is installed.

Usage: differential_template.py PEER [--seconds S | --cases N] [--seed N]
       differential_template.py PEER --templates FOLDER"""

import json
import pathlib
import random
import re
import sys

from differential import Difference, Peer, parser, run, seeded

try:
    from jinja_environment import compiler, environment, prepared
except ImportError:
    print("differential_template: skipped, there is no jinja2")
    sys.exit(0)

from random_templates import VARIABLES, random_template
from template_chats import chats

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden/tokenizer/templates.json"
TEMPLATES = [case["template"] for case in json.loads(GOLDEN.read_text())["cases"]]
TOKEN = re.compile(r"""\{%[-+]?|[-+]?%\}|\{\{[-+]?|[-+]?\}\}|\{#|#\}|'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\w+|\s+|.""",
                   re.DOTALL)
PIECES = [
    "{%- if tools %}", "{% endif %}", "{% else %}", "{% elif bos_token is defined %}", "{%- endif -%}",
    "{% if true %}", "{% if not false %}", "{% set a = 'b' %}", "{{ a }}", "{{- a -}}", "{{ bos_token }}",
    "{% if eos_token is defined %}", "{% if documents is defined %}", "{% if a is not defined %}",
    "{% if messages[0]['role'] == 'user' %}", "{% if loop.first %}", "{% if loop.last and not tools %}",
    "{% if 'a' == 'a' or x %}", "{% if 'a' != \"a\" %}", "{# c #}", "{#- c -#}", "{%+ if true +%}",
    "\n", "\r\n", "\r", "  ", "\t", "\n    ", " ~ 'x'", " + 'x'", "|trim", ".strip()", "\\n", "\\t", "\\'",
    "\\x41", "\\u0041", "\\a", "message", "messages", "'", '"', "{", "}", "-", "%", "and", "or", "not", "(", ")",
    "==", "!=", "is", "defined", "none", "None", "True", "False", "0", "1", "[0]", "[-1]", "[::-1]", "é", "\u2028",
    "\x0b", "\x0c", "\x1f", "\u0085", "\u00a0", "{% set bos_token = 'b' %}", "{% set tools = 'b' %}",
    "{% set message = 'b' %}", "{% set enable_thinking = true %}", "{% set add_generation_prompt = false %}",
]
MESSAGES = ["A message.", " padded \n", "\u2003x\u00a0", "<|im_end|>", "\x1c{{ x }}\x1f", "a\r\nb"]


# Limits of kvzap: 64-bit integers; no texts with addresses; bounds on work.
LIMITS = re.compile("64 bits|out of range|has no text|have no text|too (m|deep|wide|large)|nested too")


def mutated():
    tokens = TOKEN.findall(random.choice(TEMPLATES))
    for _ in range(random.choice([1, 1, 1, 2, 2, 3, 5])):
        at = random.randrange(len(tokens) + 1)
        kind = random.randrange(6)
        if kind <= 2:
            tokens.insert(at, random.choice(PIECES))
        elif kind == 3 and at < len(tokens):
            del tokens[at]
        elif kind == 4 and at < len(tokens):
            tokens[at] = random.choice(PIECES + tokens)
        elif at < len(tokens):
            end = min(len(tokens), at + random.randrange(1, 12))
            tokens[at:end] = tokens[at:end] * 2
    return "".join(tokens)


def outcome(render):
    """Returns what a template gives: its text, or None and the error."""
    try:
        return render(), ""
    except Exception as error:  # pylint: disable=broad-except
        return None, repr(error)


def compare_folder(peer, folder):
    """Renders all chats with all templates of a folder. Returns whether there are differences."""
    name, compiled = compiler()
    equal = refused = different = 0
    files = sorted(pathlib.Path(folder).glob("*.jinja"))
    for file in files:
        source = file.read_bytes().decode()
        template, error = outcome(lambda: compiled(source))
        differences = []
        for chat, variables in chats():
            variables = {**variables, "messages": prepared(variables["messages"])}
            expected = outcome(lambda: template.render(**variables)) if template else (None, error)
            answer = peer.ask(template=source, variables=variables)
            if answer.get("text") != expected[0]:
                differences.append(f"{chat}: jinja2 {expected}, kvzap {answer}")
            elif expected[0] is None:
                refused += 1
            else:
                equal += 1
        different += len(differences)
        if differences:
            print(f"{file.name}: {len(differences)} differences, such as {differences[0]}", flush=True)
    print(f"differential_template: {len(files)} templates, {equal} texts equal those of {name}, {refused} chats are refused by "
          f"both, {different} differ")
    return different > 0


def main():
    options = parser(__doc__)
    options.add_argument("--templates", help="compare the templates of this folder")
    given, seed = seeded(options)
    if given.templates:
        sys.exit(compare_folder(Peer(given.peer), given.templates))
    peer, jinja = Peer(given.peer), environment()

    def mutated_case():
        template, message = mutated(), random.choice(MESSAGES)
        thinking = random.random() < 0.5
        answer = peer.ask(template=template, message=message, thinking=thinking)
        if "error" in answer:
            return False
        try:
            expected = jinja.from_string(template).render(
                messages=[{"role": "user", "content": message}], tools=None, documents=None,
                add_generation_prompt=True, enable_thinking=thinking, thinking=thinking, bos_token="<s>",
                eos_token="</s>")
        except Exception:  # whatever it is, there is nothing to compare with
            return False
        if answer["prompt"] != expected:
            raise Difference(f"template {template!r}, message {message!r}, thinking {thinking}: "
                             f"jinja2 {expected!r}, kvzap {answer['prompt']!r}")
        return True

    def random_case():
        template = random_template()
        answer = peer.ask(template=template, variables=VARIABLES)
        if LIMITS.search(answer.get("error", "")):
            return False
        try:
            expected = jinja.from_string(template).render(**VARIABLES)
        except Exception as error:  # pylint: disable=broad-except
            if "error" not in answer:
                raise Difference(f"template {template!r}: jinja2 {error!r}, kvzap {answer['text']!r}") from error
            return False
        if " at 0x" in expected:
            return False
        if answer.get("text") != expected:
            raise Difference(f"template {template!r}: jinja2 {expected!r}, kvzap {answer!r}")
        return True

    def one_case():
        return mutated_case() if random.random() < 0.5 else random_case()

    run("differential_template", given, seed, one_case)


if __name__ == "__main__":
    main()
