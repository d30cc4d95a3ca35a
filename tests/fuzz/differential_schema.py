#!/usr/bin/env python3
"""Compares kvzap's grammars of JSON schemas with the package jsonschema: random texts of a grammar are valid documents,
and a document that is not valid is no text of it. The schemas are those of random_schemas.py and, if the package
check-jsonschema is installed, those that it ships. Schemas that kvzap refuses are counted. Each compiles within a second.
Without jsonschema the test is skipped.

Usage: differential_schema.py PEER [--seconds S | --cases N] [--seed N]"""

import copy
import importlib.util
import json
import pathlib
import random

import sys

from differential import Difference, Peer, parser, run, seeded

try:
    import jsonschema
except ImportError:
    print("differential_schema: skipped, there is no package jsonschema")
    sys.exit(0)

from random_schemas import WRITTEN, random_schema

SAMPLES, LIMIT = 4, 1.0  # texts of each schema; seconds to compile it
VALUES = [None, True, 0, -3, 2.5, 1e6, "", "a", "\n\"", "2026-11-29", [], [1], {}, {"id": 1}]


def published():
    """Schemas of well-known configuration files."""
    spec = importlib.util.find_spec("check_jsonschema")
    if spec is None:
        return []
    folder = pathlib.Path(spec.origin).parent / "builtin_schemas"
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))]


def validator(schema):
    kind = jsonschema.validators.validator_for(schema)
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def mutated(document):
    """A copy with one value replaced, or one member or element removed."""
    holder = {"": copy.deepcopy(document)}
    at, key = holder, ""
    while isinstance(at[key], (dict, list)) and at[key] and random.random() < 0.8:
        at = at[key]
        key = random.choice(list(at)) if isinstance(at, dict) else random.randrange(len(at))
    if at is not holder and random.random() < 0.3:
        del at[key]
    else:
        at[key] = random.choice(VALUES)
    return holder[""]


def compare(peer, schema, documents=()):
    """Whether kvzap takes the schema; raises Difference if it takes an invalid document."""
    answer = peer.ask(schema=schema, samples=SAMPLES, seed=random.randrange(2**31), documents=list(documents))
    shown = json.dumps(schema)[:2000]
    if "error" in answer:
        if documents:
            raise Difference(f"kvzap refuses {shown}: {answer['error']}")
        return 0
    if answer["seconds"] > LIMIT:
        raise Difference(f"{answer['seconds']:.1f} s to compile {shown}")
    check = validator(schema)
    for document, taken in zip(documents, answer["taken"]):
        if not check.is_valid(json.loads(document)):
            raise Difference(f"an invalid document of the test: {document} of {shown}")
        if not taken:
            raise Difference(f"{document} is no text of {shown}")
    others = []
    for text in answer["texts"]:
        try:
            document = json.loads(text)
        except ValueError as error:
            raise Difference(f"{text!r} is no JSON: {error}; schema {shown}") from None
        for error in check.iter_errors(document):
            # Quotients of doubles are rounded.
            if error.validator != "multipleOf":
                raise Difference(f"{text!r}: {error.message}; schema {shown}")
        others += [mutated(document) for _ in range(4)]
    wrong = [json.dumps(each, ensure_ascii=False) for each in others if not check.is_valid(each)]
    taken = peer.ask(schema=schema, documents=wrong)["taken"]
    for text, is_taken in zip(wrong, taken):
        if is_taken:
            raise Difference(f"{text!r} is taken, but not valid; schema {shown}")
    return 1


def main():
    given, seed = seeded(parser(__doc__))
    peer = Peer(given.peer)
    schemas = iter([(schema, documents) for schema, documents in WRITTEN] + [(schema, ()) for schema in published()])

    def one_case():
        schema, documents = next(schemas, (None, ()))
        return compare(peer, random_schema() if schema is None else schema, documents)

    run("differential_schema", given, seed, one_case)


main()
