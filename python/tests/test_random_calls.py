"""Random calls, most of them wrong: each returns or raises a known exception, and good ones still work afterwards.

KVZAP_RANDOM_CALLS sets their number, for runs under sanitizers.
"""
import os
import random

import kvzap
import numpy as np
from conftest import MODEL

CALLS = int(os.environ.get("KVZAP_RANDOM_CALLS", "1500"))
KNOWN = (kvzap.Error, TypeError, ValueError, IndexError, KeyError, OverflowError, UnicodeError, ZeroDivisionError)


def values(draw):
    """Anything that a caller may pass."""
    return draw.choice([
        None, True, -1, 0, 1, 7, 2**31, 2**63, -(2**63), 2**80, 0.5, -0.0, float("nan"), float("inf"), "", "Hello.",
        "\0", "\ud800", "a" * 300, b"bytes", [], [1, 2, 3], [-1], [2**40], ["a"], [0.5], {}, {"role": "user"},
        [{"role": "user", "content": "Hello."}], [{"role": 3, "content": None}], [{}], object(), np.arange(5),
        np.arange(5, dtype=np.int32), np.zeros((2, 2)), (), ("a", "b"), [("a", "b"), "c"], lambda *_: 1 / 0,
        lambda *_: False, kvzap.Pruning.none(), MODEL])


def test_random_calls(llm, tmp_path):
    draw = random.Random(1)
    sessions = [llm.session()]
    file = tmp_path / "good.h5"
    llm.session().read("A text.").save(file)
    files = [file, tmp_path / "none.h5", tmp_path, __file__, None, 3]

    def any_session():
        return draw.choice(sessions)

    def options():
        names = ("max_new_tokens", "on_text", "temperature", "top_k", "top_p", "min_p", "seed", "repeat_last_n", "heat")
        return {name: values(draw) for name in draw.sample(names, draw.randint(0, 2))}

    def add():
        if len(sessions) > 8:
            sessions.pop(draw.randrange(len(sessions))).close()
        sessions.append(llm.session())

    calls = [
        add,
        lambda: any_session().read(values(draw)),
        lambda: any_session().read(draw.choice(["A text. ", "Another one, of more words. "]) * draw.randint(1, 30)),
        lambda: any_session().ask(values(draw), **{"max_new_tokens": 2, **options()}),
        lambda: next(any_session().stream(values(draw), **{"max_new_tokens": 2, **options()})),
        lambda: any_session().positions(values(draw), values(draw)),
        lambda: any_session().scores(draw.randint(-1, 7), draw.randint(-1, 5)),
        lambda: any_session().save(draw.choice([tmp_path / "random.h5", tmp_path, "", None, "/none/x.h5"])),
        lambda: sessions.append(llm.resume(draw.choice(files))) if len(sessions) < 9 else None,
        lambda: any_session().report,
        lambda: (repr(any_session()), any_session().answer_ids, any_session().context_ids),
        lambda: any_session().close() if draw.random() < 0.3 else None,
        lambda: llm.generate(values(draw), max_new_tokens=draw.choice([1, 2, values(draw)])),
        lambda: llm.encode(values(draw)),
        lambda: llm.decode(values(draw)),
        lambda: kvzap.Pruning.parse(values(draw)),
        lambda: kvzap.Pruning.policy(draw.choice(["knorm", "snapkv+ada", values(draw)]), evict_ratio=values(draw)),
        lambda: kvzap.Pruning.kvzap(values(draw), threshold=values(draw), window=values(draw)),
        lambda: kvzap.ScorePolicy(values(draw), evict_ratio=values(draw), recent=values(draw)),
        lambda: kvzap.open_snapshot(draw.choice(files)).keys(values(draw), values(draw)),
    ]
    for number in range(CALLS):
        try:
            draw.choice(calls)()
        except (*KNOWN, StopIteration, OSError) as error:
            assert str(error) or not isinstance(error, kvzap.Error), number
    for session in sessions:
        session.close()
    assert llm.resume(file).ask("What?", max_new_tokens=1) is not None
