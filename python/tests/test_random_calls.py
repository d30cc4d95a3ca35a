"""Random calls, most of them wrong: each returns or raises a known exception, and good ones still work afterwards.

KVZAP_RANDOM_CALLS sets their number, for runs under sanitizers; KVZAP_SEED draws others.
"""
import os
import random

import kvzap
import numpy as np
import pytest
from conftest import MODEL, SURROGATE

CALLS = int(os.environ.get("KVZAP_RANDOM_CALLS", "1500"))
SEED = int(os.environ.get("KVZAP_SEED", "0"))
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
    draw = random.Random(1 + 2 * SEED)
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
        lambda: any_session().keys(draw.randint(-1, 7), draw.randint(-1, 5)),
        lambda: any_session().values(values(draw), values(draw)),
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


def test_random_steps():
    """The same for steps of a model that Python runs."""
    from kvzap import _kvzap

    draw, seeded = random.Random(2 + 2 * SEED), np.random.default_rng(2 + 2 * SEED)
    engine = _kvzap._Engine(MODEL, "f32", kvzap.Pruning.kvzap(SURROGATE, threshold=-4, window=8), 0, 16)
    layers, heads, queries, dim, hidden = 6, 4, 8, 32, 256
    sequences, checkpoints = [engine.add_sequence()], [engine.checkpoint(0)]
    step = []  # the tokens of the spans

    def any_sequence():
        return draw.choice([*sequences, *sequences, -1, 99, values(draw)])

    def array(*shape):
        if draw.random() < 0.03:
            return values(draw)
        if draw.random() < 0.03:
            shape = [max(0, extent + draw.choice((-1, 1))) for extent in shape]
        made = seeded.standard_normal(shape).astype(draw.choice(["float32"] * 9 + ["float16", "float64", "int32"]))
        return np.asfortranarray(made) if draw.random() < 0.2 else made

    def begin():
        step[:] = [draw.randint(1, 30) for _ in range(draw.randint(1, 2))]
        engine.begin_step([(any_sequence(), count, draw.choice(["context", "question", "generated", "held", "no part"]))
                           for count in step])

    def attend(layer):
        engine.attend(layer, [(array(queries, count, dim), array(heads, count, dim), array(heads, count, dim),
                               array(queries, count, dim), array(count, hidden), None, None)
                              for count in step])

    def run():
        begin()
        for layer in range(layers):
            attend(layer)
        engine.end_step()

    calls = [
        run, run, run, begin, lambda: attend(draw.randint(-1, layers)), engine.end_step, engine.cancel_step,
        lambda: engine.begin_step(values(draw)), lambda: engine.attend(values(draw), values(draw)),
        lambda: sequences.append(engine.add_sequence()) if len(sequences) < 9 else None,
        lambda: sequences.append(engine.fork(any_sequence())) if len(sequences) < 9 else None,
        lambda: sequences.append(engine.fork_beginning(any_sequence(), draw.randint(-1, 40))) if len(sequences) < 9 else None,
        lambda: engine.free([sequences.pop(draw.randrange(len(sequences)))]) if len(sequences) > 1 else None,
        lambda: engine.free([any_sequence()]),
        lambda: checkpoints.append(engine.checkpoint(any_sequence())),
        lambda: engine.restore(any_sequence(), draw.choice(checkpoints[-3:])),
        lambda: engine.end_context(any_sequence(), draw.random() < 0.5),
        lambda: engine.reports([any_sequence()]), engine.needs_hidden, lambda: engine.tokens(any_sequence()),
        lambda: engine.positions(any_sequence(), draw.randint(-1, 6), draw.randint(-1, 4)),
        lambda: engine.scores(any_sequence(), draw.randint(-1, 6), draw.randint(-1, 4)),
        lambda: engine.rows(any_sequence(), draw.randint(-1, 6), draw.randint(-1, 4), True),
        lambda: _kvzap._Engine(draw.choice([MODEL, values(draw)]), values(draw), values(draw), values(draw), values(draw)),
    ]
    for number in range(CALLS):
        try:
            draw.choice(calls)()
        except KNOWN as error:
            assert str(error) or not isinstance(error, kvzap.Error), number
    engine.cancel_step()
    sequence = engine.add_sequence()
    for count in (0, -1, 2**24 + 1, 2**40):
        with pytest.raises(kvzap.Error, match="expected 1 to"):
            engine.begin_step([(sequence, count, "context")])
    engine.begin_step([(sequence, 5, "context")])
    step[:] = [5]
    for layer in range(layers):
        made = [seeded.standard_normal(shape).astype("float32") for shape in (
            (queries, 5, dim), (heads, 5, dim), (heads, 5, dim), (queries, 5, dim), (5, hidden))]
        engine.attend(layer, [(*made, None, None)])
    engine.end_step()
    assert engine.tokens(sequence) == 5
