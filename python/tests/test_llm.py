"""The engine from Python: answers of the goldens, arrays, files, errors."""
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import kvzap
import kvzap._program
import numpy as np
import pytest
from conftest import MODEL, ROOT, SURROGATE, THRESHOLD


def test_answers_are_those_of_the_goldens(chat, llm, golden):
    options = {"max_new_tokens": golden["max_new_tokens"]}
    for _ in range(2):
        assert chat.ask(golden["question"], **options) == golden["pruned"]
    assert "".join(chat.stream(golden["question"], **options)) == golden["pruned"]
    assert llm.decode(chat.answer_ids[:-1]) == golden["pruned"]
    assert len(chat.context_ids) == golden["n_context"]
    full = kvzap.LLM(str(MODEL), dtype="f32").session()
    assert full.read(golden["context"]).ask(golden["question"], **options) == golden["full"]
    assert full.report.evict_ratio == 0


def test_keys_and_values_of_fewer_bits(golden):
    wide = kvzap.LLM(MODEL, dtype="f32").session().read(golden["context"])
    for kv_type in ("q8", "q8,q4"):
        llm = kvzap.LLM(MODEL, dtype="f32", kv_type=kv_type)
        assert llm.config["kv_type"] == kv_type
        chat = llm.session().read(golden["context"])
        assert chat.ask(golden["question"], max_new_tokens=golden["max_new_tokens"]) == golden["full"]
        assert chat.report.live_bytes < 0.8 * wide.report.live_bytes
    for wrong in ("q5", "bf16", "q8,f32"):
        with pytest.raises(kvzap.Error, match="q8,q4"):
            kvzap.LLM(MODEL, dtype="f32", kv_type=wrong)


def test_fewer_pages(golden):
    for read, name in (("all", "all"), (1.0, "all"), (10**6, "1000000"), (0.5, "0.5"), ("0.5", "0.5")):
        llm = kvzap.LLM(MODEL, dtype="f32", read_pages=read)
        assert llm.config["read_pages"] == name
        answer = llm.session().read(golden["context"]).ask(golden["question"], max_new_tokens=golden["max_new_tokens"])
        assert answer == golden["full"], read
    for wrong in (0, 0.0, 1.5, -1, "some", float("nan"), None):
        with pytest.raises(kvzap.Error, match="read_pages is .* expected a number of pages"):
            kvzap.LLM(MODEL, dtype="f32", read_pages=wrong)


def test_every_policy_text_is_a_pruning(golden):
    for text in ("snapkv@evict-ratio=0.5", "knorm+ada@evict-ratio=0.5", "kvzip@evict-ratio=0.25",
                 "finch@evict-ratio=0.25@prune-after=question"):
        chat = kvzap.LLM(MODEL, text).session().read(golden["context"])
        chat.ask(golden["question"], max_new_tokens=4)
        assert 0.1 < chat.report.evict_ratio < 0.6, text
    with pytest.raises(kvzap.Error, match="generate: prune-after question .* use session"):
        kvzap.LLM(MODEL, text).generate([(golden["context"], golden["question"])], max_new_tokens=4)


def test_long_answers_stay_within_the_budget(golden):
    for policy in ("h2o", "tova", "r-kv"):
        chat = kvzap.LLM(MODEL, f"{policy}@keep-tokens=48@decode-every=16@decode-keep=48").session().read(golden["context"])
        chat.ask(golden["question"], max_new_tokens=200, regex="[a-z ]{9000}")  # no end before that
        assert len(chat.answer_ids) == 200
        kept = chat.report.kept
        assert kept.min() >= 48 and kept.max() < 48 + 16, (policy, kept)


def test_a_policy_is_a_function(golden):
    layers = []

    def value_norm(layer, head):
        assert layer.keys(head).shape == layer.values(head).shape == (layer.rows(head), layer.head_dim)
        assert layer.recent_queries().shape == (8, layer.heads * layer.group, layer.head_dim)
        assert (np.diff(layer.positions(head)) > 0).all()
        layers.append((layer, layer.layer))
        return np.abs(layer.values(head).astype(np.float64)).sum(axis=1)

    llm = kvzap.LLM(MODEL, kvzap.ScorePolicy(value_norm, evict_ratio=0.5, recent=8), dtype="f32")
    chat = llm.session().read(golden["context"])
    assert (chat.report.kept == golden["n_context"] // 2).all()
    assert {number for _, number in layers} == set(range(llm.config["layers"]))
    norms = kvzap.LLM(MODEL, kvzap.ScorePolicy(lambda layer, head: -np.linalg.norm(layer.keys(head), axis=1),
                                               evict_ratio=0.5), dtype="f32").session().read(golden["context"])
    knorm = kvzap.LLM(MODEL, "knorm@evict-ratio=0.5", dtype="f32").session().read(golden["context"])
    for layer, head in np.ndindex(*norms.report.kept.shape):
        other = np.setxor1d(norms.positions(layer, head), knorm.positions(layer, head))
        assert len(other) <= 2, (layer, head)  # rounding of almost equal norms
    with pytest.raises(kvzap.Error, match="during the call"):
        layers[0][0].keys(0)
    for function, error in ((lambda layer, head: 1 / 0, ZeroDivisionError), (lambda layer, head: np.zeros(3), ValueError),
                            (lambda layer, head: layer.keys(99), IndexError), (lambda layer, head: "x", ValueError)):
        with pytest.raises(error):
            kvzap.LLM(MODEL, kvzap.ScorePolicy(function, evict_ratio=0.5)).session().read(golden["context"])


def test_report_counts_rows_and_bytes(chat, golden):
    report = chat.report
    tokens = golden["n_context"]
    assert (report.context_tokens, report.tokens) == (tokens, tokens)
    assert report.kept.shape == report.layer_evict_ratios.shape + (report.kept.shape[1],)
    assert report.evict_ratio == pytest.approx(1 - report.kept.mean() / tokens)
    assert report.live_bytes / report.full_bytes == pytest.approx(1 - report.evict_ratio)
    assert report.live_bytes <= report.allocated_bytes <= report.peak_allocated_bytes
    assert report.read_seconds > 0
    for text in (str(report), repr(report), report._repr_html_(), repr(chat), chat._repr_html_()):
        assert "B" in text
    assert str(THRESHOLD) in report.pruning


def test_rows_are_arrays(chat):
    report = chat.report
    for layer, head in ((0, 0), (report.kept.shape[0] - 1, report.kept.shape[1] - 1)):
        positions, scores = chat.positions(layer, head), chat.scores(layer, head)
        assert positions.dtype == np.int64 and scores.dtype == np.float32
        assert len(positions) == len(scores) == report.kept[layer, head]
        assert (np.diff(positions) > 0).all() and positions[-1] == report.tokens - 1
        judged = positions < report.tokens - 128
        assert (scores[judged] >= np.float32(THRESHOLD)).all()
    for layer, head in ((-1, 0), (0, 99), (99, 0)):
        with pytest.raises(IndexError):
            chat.positions(layer, head)


def test_files(chat, llm, golden, tmp_path):
    file = tmp_path / "report.h5"
    chat.save(file)
    options = {"max_new_tokens": golden["max_new_tokens"]}
    assert llm.resume(file).ask(golden["question"], **options) == golden["pruned"]
    with pytest.raises(kvzap.Error, match="pruning"):
        kvzap.LLM(MODEL, dtype="f32").resume(file)
    with pytest.raises(kvzap.Error, match="none.h5"):
        llm.resume(tmp_path / "none.h5")
    with kvzap.open_snapshot(file) as snapshot:
        assert (snapshot.kept == chat.report.kept).all()
        for layer, head in ((0, 0), (2, 1)):
            assert (snapshot.positions(layer, head) == chat.positions(layer, head)).all()
            np.testing.assert_array_equal(snapshot.scores(layer, head), chat.scores(layer, head))
            assert snapshot.keys(layer, head).shape == (snapshot.kept[layer, head], snapshot.head_dim)
            np.testing.assert_array_equal(snapshot.keys(layer, head), chat.keys(layer, head))
            np.testing.assert_array_equal(snapshot.values(layer, head), chat.values(layer, head))
        assert (snapshot.values(True, False) == snapshot.values(1, 0)).all()
        with pytest.raises(IndexError):
            snapshot.keys(0, 99)
        with pytest.raises(TypeError):
            snapshot.keys(0.5, 0)
    with pytest.raises(kvzap.Error):
        snapshot.keys(1, 0)  # closed
    with pytest.raises(kvzap.Error, match="snapshot"):
        kvzap.open_snapshot(__file__)
    figure = kvzap.plot.snapshot(file, kind="raster")
    assert figure.axes
    with pytest.raises(kvzap.Error, match="kind"):
        kvzap.plot.snapshot(file, kind="pie")


def test_files_of_the_program(chat, llm, golden, tmp_path):
    """A session, kvzap run and kvzap chat continue from one another's files."""
    most = ["-n", str(golden["max_new_tokens"])]

    def program(*arguments, **given):
        command = [kvzap._program.program(), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, **given)
        assert done.returncode == 0, done.stderr
        return done.stdout

    question, options = golden["question"], {"max_new_tokens": golden["max_new_tokens"]}
    saved, of_run, of_chat = (tmp_path / name for name in ("saved.h5", "run.h5", "chat.h5"))
    chat.save(saved)
    assert program("run", "-q", "--resume", saved, "--question", question, *most) == golden["pruned"] + "\n"
    assert program("chat", "-q", "--resume", saved, *most, input=question) == golden["pruned"] + "\n"
    # The last answer is in the file.
    chat.ask(question, **options)
    chat.save(saved)
    assert program("run", "-q", "--resume", saved) == golden["pruned"] + "\n"
    pruning = ("--dtype", "f32", "--surrogate", SURROGATE, f"--threshold={THRESHOLD}")
    program("run", "-q", "-m", MODEL, *pruning, "-p", golden["context"], "-n", 1, "--snapshot", of_run)
    assert llm.resume(of_run).ask(question, **options) == golden["pruned"]
    program("chat", "-q", "-m", MODEL, *pruning, "--prune", "prefill", "-p", golden["context"], "-n", 4,
            input=f"{question}\n/save {of_chat}\n")
    resumed = llm.resume(of_chat)
    assert resumed.report.context_tokens > golden["n_context"]
    assert resumed.ask("And then?", max_new_tokens=4)
    for wrong in ("--evict-ratio=0.5", "--window=64"):
        done = subprocess.run([kvzap._program.program(), "run", "-q", "--resume", saved, wrong], capture_output=True, text=True)
        assert done.returncode == 2 and "was made with" in done.stderr, done.stderr
    # The last answer and its question go on with the file, and so does RoPE scaling.
    resumed = llm.resume(saved)
    resumed.save(saved)
    assert program("run", "-q", "--resume", saved) == golden["pruned"] + "\n"
    program("run", "-q", "-m", MODEL, *pruning, "--rope-scaling", "yarn", "--rope-scale", 2, "-p", golden["context"], "-n", 1,
            "--snapshot", of_run)
    with pytest.raises(kvzap.Error, match="RoPE scaling yarn 2"):
        llm.resume(of_run)
    program("run", "-q", "-m", MODEL, *pruning, "--window", 64, "-p", golden["context"], "-n", 1, "--snapshot", of_run)
    with pytest.raises(kvzap.Error, match="pruning.*window=64"):
        llm.resume(of_run)


@pytest.mark.parametrize("kv_type", ["q8", "q4", "q8,q4", "q3,q2"])
def test_files_of_quantised_rows(golden, tmp_path, kv_type):
    llm = kvzap.LLM(MODEL, kvzap.Pruning.kvzap(SURROGATE, threshold=THRESHOLD), dtype="f32", kv_type=kv_type)
    chat = llm.session().read(golden["context"])
    file = tmp_path / "report.h5"
    chat.save(file)
    options = {"max_new_tokens": golden["max_new_tokens"]}
    assert llm.resume(file).ask(golden["question"], **options) == chat.ask(golden["question"], **options)
    with kvzap.open_snapshot(file) as snapshot:
        assert snapshot.kv_type == kv_type
        again = llm.resume(file)
        for layer, head in ((0, 0), (2, 1)):
            np.testing.assert_allclose(snapshot.keys(layer, head), again.keys(layer, head), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(snapshot.values(layer, head), again.values(layer, head), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_type", [None, "q8"])
def test_files_of_latent_rows(tmp_path, kv_type):
    """Values are the keys: the file has one data set for both."""
    pytest.importorskip("h5py")
    folder = shutil.copytree(ROOT / "tests/golden/families/deepseek_v2", tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):  # the random model has none
        shutil.copy(MODEL / name, folder)
    prompt = json.loads((folder / "golden.json").read_text())["prompt"]
    chat = kvzap.LLM(folder, "knorm@evict-ratio=0.5", dtype="f32", kv_type=kv_type).session().read(prompt)
    chat.save(tmp_path / "report.h5")
    with kvzap.open_snapshot(tmp_path / "report.h5") as snapshot:
        assert (snapshot.kept == chat.report.kept).all() and snapshot.kept.max() == len(prompt) // 2
        for layer in range(snapshot.n_layers):
            for found, expected in ((snapshot.keys(layer, 0), chat.keys(layer, 0)),
                                    (snapshot.values(layer, 0), chat.values(layer, 0))):
                assert found.shape == (snapshot.kept[layer, 0], snapshot.head_dim)
                np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_paths_are_those_of_the_beginning(golden, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    pruning = kvzap.Pruning.kvzap(SURROGATE.relative_to(ROOT), threshold=THRESHOLD)
    llm = kvzap.LLM(MODEL.relative_to(ROOT), pruning, dtype="f32")
    chat = llm.session().read(golden["context"])
    monkeypatch.chdir(tmp_path)
    chat.save("here.h5")
    assert llm.resume("here.h5").report.context_tokens == golden["n_context"]
    (tmp_path / "bad.h5").write_bytes((tmp_path / "here.h5").read_bytes()[:5000])
    with pytest.raises(kvzap.Error):
        llm.resume("bad.h5")


def test_many_prompts_at_once(llm, golden):
    options = {"max_new_tokens": golden["max_new_tokens"]}
    pairs = [(golden["context"], golden["question"]), ("Short.", "And?"), (golden["context"][:500], "\nWhat?")]
    answers = llm.generate(pairs, **options)
    assert answers[0] == golden["pruned"]
    for (context, question), answer in zip(pairs, answers):
        assert llm.session().read(context).ask(question, **options) == answer
    assert llm.generate([]) == []
    with pytest.raises(TypeError, match="list of texts"):
        llm.generate("A riddle.")
    with pytest.raises(kvzap.Error, match="max_new_tokens|new tokens"):
        llm.generate(["A riddle."], max_new_tokens=0)
    assert len(llm.generate(["One.", "Two."], max_new_tokens=3)) == 2


def test_sampling(chat, golden):
    options = {"max_new_tokens": 8, "temperature": 5.0}
    one, two, other = (chat.ask("", seed=seed, **options) for seed in (1, 1, 2))
    assert one == two != other
    assert kvzap.LLM(MODEL, temperature=1.0, seed=3).session()
    with pytest.raises(kvzap.Error, match="top_p"):
        chat.ask("", top_p=2.0)
    with pytest.raises(TypeError, match="heat"):
        chat.ask("", heat=1)


def test_messages_and_ids(llm, golden):
    messages = [{"role": "user", "content": golden["context"]}]
    options = {"max_new_tokens": golden["max_new_tokens"]}
    chat = llm.session().read(messages)
    assert chat.ask(golden["question"], **options) == golden["pruned"]
    again = llm.session().read(chat.context_ids)
    assert again.ask(golden["question"], **options) == golden["pruned"]
    with pytest.raises(ValueError, match="robot"):
        llm.session().read([{"role": "robot", "content": "hello"}])
    text = "A magic number."
    assert llm.decode(llm.encode(text)) == text


def test_callbacks(chat, golden):
    question = golden["question"]
    pieces = []
    chat.ask(question, on_text=lambda piece: pieces.append(piece) or len(pieces) < 2)
    assert len(pieces) == 2
    with pytest.raises(ZeroDivisionError):
        chat.ask(question, on_text=lambda piece: 1 / 0)
    for call in (lambda piece: chat.ask("x"), lambda piece: next(chat.stream("x")), lambda piece: chat.report):
        with pytest.raises(kvzap.Error, match="callback"):
            chat.ask(question, on_text=call)
    stream = chat.stream(question, max_new_tokens=1000)
    next(stream)
    stream.close()
    assert chat.ask(question, max_new_tokens=golden["max_new_tokens"]) == golden["pruned"]
    with pytest.raises(kvzap.Error):
        list(chat.stream(question, max_new_tokens=0))


def test_progress_is_told_and_ends_a_reading(golden):
    seen = []

    def progress(what, done, total):
        seen.append(what)
        assert 0 <= done <= total
        if stops and what == "prefill":
            raise KeyError("enough")

    stops = False
    llm = kvzap.LLM(MODEL, f"kvzap@surrogate={SURROGATE}@threshold={THRESHOLD}", dtype="f32", progress=progress)
    chat = llm.session()
    stops = True
    with pytest.raises(KeyError):
        chat.read(golden["context"])
    stops = False
    chat.read(golden["context"])
    assert chat.ask(golden["question"], max_new_tokens=golden["max_new_tokens"]) == golden["pruned"]
    assert {"load", "prefill"} <= set(seen)


@pytest.mark.parametrize("arguments, error, text", [
    (("nowhere",), kvzap.Error, "nowhere"),
    ((MODEL, "snapkv@evict-ratio=2"), kvzap.Error, "evict"),
    ((MODEL, "no-such-policy@evict-ratio=0.5"), kvzap.Error, "no-such-policy"),
    ((MODEL, 7), TypeError, "pruning"),
    ((None,), TypeError, "None"),
])
def test_bad_models_and_prunings(arguments, error, text):
    with pytest.raises(error, match=text):
        kvzap.LLM(*arguments)


def test_bad_input(llm, golden):
    for name, value in (("dtype", "f8"), ("weights", "q3"), ("threads", -1), ("max_context", -5)):
        with pytest.raises(kvzap.Error, match=str(value)):
            kvzap.LLM(MODEL, **{name: value})
    with pytest.raises(TypeError):
        kvzap.LLM(MODEL, heat=3)
    chat = llm.session()
    for content in ("", [], [-1], [10**6]):
        with pytest.raises(kvzap.Error):
            chat.read(content)
    for content in (None, 3, [0.5], ["a"], {"role": "user"}):
        with pytest.raises(TypeError):
            chat.read(content)
    with pytest.raises(kvzap.Error, match="read one first"):
        chat.ask("What?")
    with pytest.raises(kvzap.Error):
        chat.positions(0, 0)
    with pytest.raises(kvzap.Error, match="expected"):
        llm.decode([-1])
    chat.close()
    chat.close()
    for call in (lambda: chat.ask("x"), lambda: chat.read("x"), lambda: chat.report, lambda: chat.save("x.h5")):
        with pytest.raises(kvzap.Error, match="closed"):
            call()
    assert "closed" in repr(chat)
    with kvzap.LLM(MODEL) as other:
        left = other.session()
    with pytest.raises(kvzap.Error, match="closed"):
        other.session()
    assert "closed" in repr(other)
    left.read("A session keeps what it needs.")


def test_windows_of_the_surrogate(tmp_path):
    """A session and a cache take the window of thresholds.json, and tell the number."""
    folder = tmp_path / "surrogate"
    shutil.copytree(SURROGATE, folder)
    row = {"mean": 0.5, "deviation": 0, "least": 0, "most": 1}
    windows = [{"window": window, "rows": [{**row, "evict_ratio": 0.5, "threshold": threshold}]}
               for window, threshold in ((32, -4), (8, -5))]
    table = {"format": "kvzap.thresholds", "format_version": 2, "model": "m", "dtype": "f32", "chat_template": True,
             "texts": 1, "tokens": 200, "sink": 0, "windows": windows}
    (folder / "thresholds.json").write_text(json.dumps(table))
    llm = kvzap.LLM(MODEL, kvzap.Pruning.kvzap(folder, evict_ratio=0.5, window="auto"), dtype="f32")
    assert llm.pruning == kvzap.Pruning.kvzap(folder, threshold=-5, window=8)
    with pytest.raises(kvzap.Error, match="window auto: .*thresholds.json: expected the field recommended"):
        kvzap.LLM(MODEL, kvzap.Pruning.kvzap(folder, threshold=-4, window="auto"))


def test_prunings_are_values():
    pruning = kvzap.Pruning.kvzap("folder", threshold=-4)
    assert pruning == kvzap.Pruning.parse(str(pruning)) != kvzap.Pruning.none()
    assert eval(repr(pruning)) == pruning
    assert len({pruning, kvzap.Pruning.parse(str(pruning))}) == 1
    assert kvzap.Pruning.policy("snapkv:window=16+ada", evict_ratio=0.5) == kvzap.Pruning.parse(
        "snapkv:window=16+ada@evict-ratio=0.5")
    assert "auto" in str(kvzap.Pruning.kvzap("folder", threshold="auto"))
    auto = kvzap.Pruning.kvzap("folder", threshold=-4, window="auto")
    assert auto.window == "auto" and str(auto).endswith("@window=auto") and eval(repr(auto)) == auto
    assert pruning.window == 128
    with pytest.raises(kvzap.PruningError, match="window auto needs surrogate"):
        kvzap.Pruning.parse("snapkv@evict-ratio=0.5@window=auto")
    for wrong in ("wide", 3.5, None):
        with pytest.raises((ValueError, TypeError), match="window: expected a whole number of tokens or \"auto\""):
            kvzap.Pruning.kvzap("folder", threshold=-4, window=wrong)
    with pytest.raises(kvzap.Error, match="evict-ratio"):
        kvzap.Pruning.parse("snapkv@evict-ration=0.5")
    with pytest.raises((ValueError, TypeError)):
        kvzap.Pruning.kvzap("folder", threshold="soon")
    with pytest.raises(kvzap.PruningError) as error:
        kvzap.LLM(MODEL, "snapkv@evict-ratio=2")
    assert error.value.code == "out_of_range" and error.value.fields == ("evict_ratio",)
    for amounts in ({}, {"evict_ratio": 0.5, "keep_tokens": 10}):
        with pytest.raises(ValueError, match="one of"):
            kvzap.ScorePolicy(lambda layer, head: None, **amounts)


def test_threads_take_turns(llm, golden):
    answers, options = [], {"max_new_tokens": golden["max_new_tokens"]}

    def work():
        chat = llm.session().read(golden["context"])
        answers.append(chat.ask(golden["question"], **options))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [golden["pruned"]] * 4


def run(code, before=(), **options):
    """A new interpreter with the model's folder in MODEL."""
    head = f"import kvzap\nMODEL, SURROGATE = {str(MODEL)!r}, {str(SURROGATE)!r}\n"
    return subprocess.Popen([*before, sys.executable, "-c", head + textwrap.dedent(code)], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, env={**os.environ, "KOKKOS_DISABLE_WARNINGS": "1"}, **options)


def test_the_interpreter_ends_with_sessions_in_any_order():
    process = run("""
        llm = kvzap.LLM(MODEL)
        chat = llm.session().read("A long text.")
        kept = [llm.session(), chat.stream("What?")]
        next(kept[1])
        cycle = [chat]; cycle.append(cycle)
        del llm
        print(chat.report.context_tokens > 0)
        """)
    out, err = process.communicate(timeout=120)
    assert (out, err, process.returncode) == ("True\n", "", 0)


def test_a_callback_that_refers_to_its_model_does_not_hang_the_exit():
    process = run('''
        class Watch:
            def __init__(self):
                self.llm = kvzap.LLM(MODEL, progress=self.tick)
                self.chat = self.llm.session().read("A long text.")
            def tick(self, *_):
                pass
        Watch()
        print("done")
        ''')
    out, err = process.communicate(timeout=120)
    assert (out, err, process.returncode) == ("done\n", "", 0)


def test_a_forked_child_exits():
    process = run('''
        import os, sys
        chat = kvzap.LLM(MODEL).session().read("A long text.")
        pieces = chat.stream("What?", max_new_tokens=50)
        next(pieces)
        child = os.fork()
        if child == 0:
            del chat
            sys.exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(list(pieces)) >= 0)
        ''')
    out, err = process.communicate(timeout=120)
    assert (out, process.returncode) == ("5 True\n", 0), err


def test_forks_are_refused():
    process = run("""
        import os
        chat = kvzap.LLM(MODEL).session().read("A long text.")
        child = os.fork()
        if child == 0:
            try:
                chat.ask("What?")
            except kvzap.Error as error:
                os._exit(7 if "spawn" in str(error) else 8)
            os._exit(9)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), chat.ask("What?", max_new_tokens=1) != 3)
        """)
    out, err = process.communicate(timeout=120)
    assert (out, process.returncode) == ("7 True\n", 0), err


def test_ctrl_c_ends_an_answer():
    process = run("""
        chat = kvzap.LLM(MODEL).session().read("A long text.")
        print("ready", flush=True)
        try:
            while True:
                chat.ask("What?", max_new_tokens=2000)
        except KeyboardInterrupt:
            print("ended", chat.ask("What?", max_new_tokens=1) is not None)
        """)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (out, process.returncode) == ("ended True\n", 0), err


def test_ranks_of_mpi4py(golden):
    if not kvzap._kvzap.has_mpi:
        with pytest.raises(kvzap.Error, match="without MPI"):
            kvzap.LLM(MODEL, comm=7)
        return
    pytest.importorskip("mpi4py")
    code = f'''
        import json
        from mpi4py import MPI
        case = json.loads(open({str(ROOT / "tests/golden/recall-4m.json")!r}).read())[0]
        llm = kvzap.LLM(MODEL, kvzap.Pruning.kvzap(SURROGATE, threshold={THRESHOLD}), dtype="f32", comm=MPI.COMM_WORLD)
        chat = llm.session().read(case["context"])
        answer = chat.ask(case["question"], max_new_tokens=case["max_new_tokens"])
        if MPI.COMM_WORLD.rank == 0: print(answer)
        report = chat.report
        pairs = llm.generate([(case["context"], case["question"])], max_new_tokens=case["max_new_tokens"])
        if MPI.COMM_WORLD.rank == 0: print(pairs[0], report.kept.shape)
        refused = 0
        for options in ({{"max_new_tokens": 0}}, {{"top_p": 2.0}}):
            try:
                llm.generate([("A text.", "What?")] if MPI.COMM_WORLD.rank == 0 else [], **options)
            except kvzap.Error:
                refused += 1
        refused = MPI.COMM_WORLD.allreduce(refused)
        if MPI.COMM_WORLD.rank == 0: print("refused", refused)  # rank 0 alone writes: launchers mix ranks' lines
        '''
    process = run(code, before=["mpiexec", "--allow-run-as-root", "--oversubscribe", "-n", "2"])
    out, err = process.communicate(timeout=120)
    assert out.splitlines() == [golden["pruned"], f"{golden['pruned']} (6, 4)", "refused 4"], err
    assert process.returncode == 0


def test_the_program_comes_along():
    version = subprocess.run([kvzap._program.program(), "--version"], capture_output=True, text=True, check=True)
    assert kvzap.__version__ in version.stdout


def test_a_cut_answer_says_so(llm, golden):
    chat = llm.session().read(golden["context"])
    assert (chat.report.stop_reason, chat.report.is_cut) == ("", False)
    chat.ask(golden["question"], max_new_tokens=golden["max_new_tokens"])
    assert (chat.report.stop_reason, chat.report.is_cut) == ("stop_id", False)
    assert "cut" not in str(chat.report) + repr(chat.report)
    chat.ask(golden["question"], max_new_tokens=2)
    report = chat.report
    assert (report.stop_reason, report.is_cut, report.answer_tokens) == ("max_new_tokens", True, 2)
    assert "2 tokens, cut at max_new_tokens" in str(report) and "answer cut" in repr(report)
    chat.ask(golden["question"], on_text=lambda piece: False)
    assert (chat.report.stop_reason, chat.report.is_cut) == ("", False)
    limit = golden["n_context"] + 30
    narrow = kvzap.LLM(MODEL, dtype="f32", max_context=limit).session().read(golden["context"])
    narrow.ask(golden["question"], max_new_tokens=500)
    if narrow.report.is_cut:
        assert "cut at the longest context" in str(narrow.report)


LONE = "half of a pair: \udc80"


@pytest.mark.parametrize("call", [
    lambda llm: llm.session().read(LONE),
    lambda llm: llm.session().read([{"role": "user", "content": LONE}]),
    lambda llm: llm.session().read("A text.").ask(LONE),
    lambda llm: list(llm.session().read("A text.").stream(LONE)),
    lambda llm: llm.generate([LONE]),
    lambda llm: llm.generate([("A text.", LONE)]),
    lambda llm: llm.encode(LONE),
    lambda llm: kvzap.LLM(MODEL, system=LONE),
    lambda llm: kvzap.LLM(MODEL, LONE),
    lambda llm: kvzap.LLM(MODEL, dtype=LONE),
    lambda llm: kvzap.Pruning.parse(LONE),
    lambda llm: kvzap.Pruning.policy(LONE, evict_ratio=0.5),
])
def test_text_with_a_surrogate_is_no_text(llm, call):
    with pytest.raises(ValueError, match=r"character 16 is the surrogate U\+DC80; expected text that UTF-8 can encode"):
        call(llm)


@pytest.mark.parametrize("make", [
    lambda name: kvzap.press(name, evict_ratio=0.5),
    lambda name: kvzap.Pruning.policy(name, evict_ratio=0.5),
    lambda name: kvzap.Pruning.parse(name + "@evict-ratio=0.5"),
])
def test_misspelt_policies_fail_at_once(make):
    for name, near in (("snap", "snapkv"), ("snpkv", "snapkv"), ("snapkv:windw=32", "window"), ("snapkv+adda", "ada"),
                       ("knorm+snapkv", "both policies")):
        with pytest.raises(kvzap.Error, match=near):
            make(name)
    assert make("snapkv:window=32+ada")


def test_amounts_out_of_range_fail_at_once():
    for make in (lambda ratio: kvzap.press("snapkv", evict_ratio=ratio),
                 lambda ratio: kvzap.Pruning.policy("snapkv", evict_ratio=ratio),
                 lambda ratio: kvzap.Pruning.parse(f"snapkv@evict-ratio={ratio}"),
                 lambda ratio: kvzap.ScorePolicy(print, evict_ratio=ratio)):
        with pytest.raises(kvzap.PruningError, match="evict_ratio is 1.5; expected at least 0 and less than 1"):
            make(1.5)
    with pytest.raises(kvzap.PruningError, match="how much is evicted"):
        kvzap.press("snapkv")
    assert kvzap.Pruning.policy("kvzap")  # of kvzap.evaluate, which has the surrogate and the amounts
    with pytest.raises(TypeError, match="found int"):
        kvzap.press(5)


def test_names_of_hubs_are_no_paths():
    with pytest.raises(kvzap.Error) as failure:
        kvzap.LLM("Qwen/No-Such-Model")
    assert str(failure.value).startswith("Qwen/No-Such-Model")


def test_nothing_heavy_is_imported():
    process = run("import sys; print(sorted({'torch', 'transformers', 'matplotlib', 'h5py'} & set(sys.modules)))")
    assert process.communicate(timeout=120)[0] == "[]\n"


def test_the_version_is_the_project_s():
    text = pathlib.Path(ROOT / "CMakeLists.txt").read_text()
    assert f"VERSION {kvzap.__version__} " in text
