"""Policies of Python by their names, and the server in the process of Python."""
import json
import os
import signal
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request

import numpy as np
import pytest
from conftest import MODEL

import kvzap

CONTEXT = "People came and went as they always did. The code of Vera is 0507. " * 20


def value_norm(layer, head):
    return np.abs(layer.values(head)).sum(axis=1)


def newest(layer, head):
    return layer.positions(head).astype(np.float32)


def answer_of(pruning):
    with kvzap.LLM(MODEL, pruning, dtype="f32").session() as session:
        return session.read(CONTEXT).ask("The code of Vera is", max_new_tokens=12), session.report.kept.tolist()


def test_a_name_is_the_function():
    assert kvzap.add_policy(value_norm) == "value_norm"
    assert answer_of("value_norm@evict-ratio=0.5") == answer_of(kvzap.ScorePolicy(value_norm, evict_ratio=0.5))


def test_names_take_modifiers_and_cuts_of_answers():
    calls = []

    def seen(layer, head):
        calls.append(layer.tokens)
        return newest(layer, head)

    kvzap.add_policy(seen, "seen-newest")
    with kvzap.LLM(MODEL, "seen-newest+global@keep-tokens=64@decode-every=4@decode-keep=64", dtype="f32").session() as session:
        session.read(CONTEXT)
        after_context = max(calls)
        session.ask("The code of Vera is", max_new_tokens=16)
    assert max(calls) >= after_context + 12  # it scored again while the model answered


def test_a_name_given_again_is_the_newer_function():
    answers = {}
    for function in (value_norm, newest):
        kvzap.add_policy(function, "changing")
        answers[function] = answer_of("changing@keep-tokens=32")
        assert answers[function] == answer_of(kvzap.ScorePolicy(function, keep_tokens=32))
    assert answers[value_norm] != answers[newest]
    with pytest.raises(kvzap.Error, match="another recent or by_token"):
        kvzap.add_policy(newest, "changing", recent=4)


def test_the_policy_of_a_server_gets_no_name(tmp_path):
    deck = tmp_path / "deck.toml"
    deck.write_text('policy = "unknown"\n')
    kvzap.add_policy(value_norm, "own")
    expected = answer_of("own@keep-tokens=32")
    names = kvzap._kvzap._added_policies()
    for name in ("own", "knorm", "never", "never"):
        policy = kvzap.ScorePolicy(newest, evict_ratio=0.5, name=name, recent=len(names))
        with pytest.raises(kvzap.Error, match="port"):
            kvzap.serve(MODEL, policy, port=-3, config=deck)
        with pytest.raises(ValueError, match=f"expected no prefix_store beside .*{name}"):
            kvzap.serve(MODEL, kvzap.press(policy), prefix_store="store")
    assert kvzap._kvzap._added_policies() == names
    assert answer_of("own@keep-tokens=32") == expected


@pytest.mark.parametrize("name", ["snapkv", "ada", "none"])
def test_names_of_others_are_refused(name):
    with pytest.raises(kvzap.Error, match=f"the policy {name} exists"):
        kvzap.add_policy(value_norm, name)


def test_bad_arguments(tmp_path):
    for name in ("a+b", "", "-", "--help"):
        with pytest.raises(kvzap.Error, match="expected letters, digits"):
            kvzap.add_policy(value_norm, name)
    with pytest.raises(TypeError, match="expected a function"):
        kvzap.add_policy("knorm")
    with pytest.raises(ValueError, match="recent is -1"):
        kvzap.add_policy(value_norm, recent=-1)
    with pytest.raises(TypeError, match="policy: expected a text"):
        kvzap.serve(MODEL, 3)
    with pytest.raises(kvzap.Error, match="port"):
        kvzap.serve(MODEL, port=-3)
    kvzap.add_policy(value_norm)
    with pytest.raises(ValueError, match="expected no prefix_store"):
        kvzap.serve(MODEL, prefix_store="store")
    deck = tmp_path / "deck.toml"
    deck.write_text('prefix-store = "store"\n')
    with pytest.raises(ValueError, match="expected no prefix_store"):
        kvzap.serve(MODEL, config=deck)
    text = "value_norm@evict-ratio=0.5"
    for policy in (text, f"none;{text}", kvzap.Pruning.parse(text)):
        with pytest.raises(ValueError, match="expected the function itself"):
            kvzap.evaluate(MODEL, [{"context": "a", "question": "b", "answer": ["c"]}], policy)


SERVER = textwrap.dedent("""
    import sys
    import numpy as np
    import kvzap

    def value_norm(layer, head):
        return np.abs(layer.values(head)).sum(axis=1)

    def broken(layer, head):
        raise ZeroDivisionError("division by zero")

    class Unprintable(Exception):
        def __str__(self):
            raise self

    FAILURES = [ValueError("\\udc80"), Unprintable(), MemoryError(), SystemExit(3), kvzap.Error("mine")]

    def fails(layer, head):
        raise FAILURES[0]

    def short(layer, head):
        FAILURES.append(FAILURES.pop(0))
        return np.ones(3)

    kvzap.add_policy(broken)
    kvzap.add_policy(fails)
    kvzap.add_policy(short)
    kvzap.add_policy(value_norm, "by-value")
    kvzap.serve(sys.argv[1], kvzap.ScorePolicy(value_norm, evict_ratio=0.5), port=0, dtype="f32")
    print("ended")
""")


def test_requests_name_policies_of_python():
    package = os.path.dirname(os.path.dirname(kvzap.__file__))
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(MODEL)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env={**os.environ, "PYTHONPATH": package})
    try:
        address = next(line for line in process.stderr if "listening on" in line).split()[-1]

        def answer(**fields):
            body = {"prompt": CONTEXT, "max_tokens": 4, "temperature": 0, **fields}
            request = urllib.request.Request(f"{address}/v1/completions", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)

        own, named, full = answer(), answer(kvzap={"policy": "by-value", "evict_ratio": 0.5}), answer(kvzap={"policy": "none"})
        assert own["choices"][0]["text"] == named["choices"][0]["text"]
        assert own["kvzap"] == named["kvzap"]
        assert own["kvzap"]["kv_bytes"] < 0.6 * full["kvzap"]["kv_bytes"]
        with pytest.raises(urllib.error.HTTPError) as failed:
            answer(kvzap={"policy": "broken", "evict_ratio": 0.5})
        assert failed.value.code == 500
        assert json.load(failed.value)["error"]["message"] == "policy broken: ZeroDivisionError: division by zero"
        for expected in [r"ValueError: \udc80", "Unprintable", "MemoryError", "SystemExit: 3", "Error: mine"]:
            for name, text in [("fails", expected), ("short", "found (3,)")]:  # which is raised without Python's types
                with pytest.raises(urllib.error.HTTPError) as failed:
                    answer(kvzap={"policy": name, "evict_ratio": 0.5})
                assert json.load(failed.value)["error"]["message"].endswith(text)
        assert answer()["choices"] == own["choices"]  # the server goes on
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, "ended\n")
    finally:
        process.kill()
        process.communicate()
