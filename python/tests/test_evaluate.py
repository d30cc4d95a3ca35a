"""kvzap.evaluate: the numbers of `kvzap eval`, and policies that are functions."""
import functools
import json
import os
import signal
import subprocess
import sys
import time
import types

import kvzap
import kvzap._program
import numpy as np
import pytest
from conftest import MODEL, ROOT, SURROGATE
from kvzap._evaluate import _Settings

TASKS = ROOT / "inputs/eval/recall-256.jsonl"
QUICK = {"per_task": 1, "dtype": "f32"}


def key_norm(layer, head):
    return -np.linalg.norm(layer.keys(head), axis=1)


def numbers(rows):
    """What does not depend on the machine's speed."""
    return [{name: value for name, value in row.items() if "seconds" not in name} for row in rows]


def test_numbers_are_those_of_the_program(tmp_path):
    policies = ["none", "knorm", "snapkv+ada", f"kvzap@surrogate={SURROGATE}@threshold=-4.3"]
    command = [kvzap._program.program(), "eval", "-q", "-m", MODEL, "--tasks", TASKS, "--policies", ";".join(policies),
               "--evict-ratios", "0.5", "--per-task", "2", "--dtype", "f32", "-o", tmp_path / "program"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    expected = json.loads((tmp_path / "program/summary.json").read_text())["rows"]
    mixed = ["none", kvzap.press("knorm", evict_ratio=0.5), "snapkv+ada", kvzap.Pruning.kvzap(SURROGATE, threshold=-4.3)]
    table = kvzap.evaluate(MODEL, TASKS, mixed, evict_ratios=0.5, per_task=2, dtype="f32", output=tmp_path / "python",
                           progress=False)
    assert len(table) == len(expected)
    named = [{name: value for name, value in row.items() if name not in ("setting", "policy")} for row in numbers(table)]
    assert named == [{name: row[name] for name in own} for row, own in zip(numbers(expected), named)]
    assert [set(row) for row in table] == [set(row) for row in expected]
    assert kvzap.plot.eval(table.folder, kind="curve").axes


def test_a_function_is_evaluated_as_the_policy_that_it_writes(capfd):
    table = kvzap.evaluate(MODEL, [TASKS], ["knorm", kvzap.ScorePolicy(key_norm, evict_ratio=0.5), key_norm],
                           evict_ratios=[0.25, 0.5], **QUICK)
    rows = {(row["task"], row["setting"]): row for row in numbers(table)}
    settings = list(dict.fromkeys(setting for _, setting in rows))
    assert settings == ["knorm@evict-ratio=0.25", "knorm@evict-ratio=0.5", "python:key_norm@evict-ratio=0.5",
                        "python:key_norm@evict-ratio=0.25"]
    for (task, setting), row in rows.items():
        if row["policy"] == "python:key_norm":
            builtin = rows[task, setting.replace("python:key_norm", "knorm")]
            assert {**row, "setting": "", "policy": ""} == {**builtin, "setting": "", "policy": ""}
    captured = capfd.readouterr()
    assert captured.out == "" and "kvzap.evaluate" in captured.err
    assert "python:key_norm" in str(table) and "<table>" in table._repr_html_()


def test_thresholds_and_windows_of_functions():
    recency = kvzap.ScorePolicy(lambda layer, head: layer.positions(head), threshold=100, window=32, by_token=True,
                                name="recency")
    full, pruned = kvzap.evaluate(MODEL, TASKS, ["none", recency], progress=False, **QUICK).rows[:2]
    assert (pruned["setting"], pruned["threshold"]) == ("python:recency@threshold=100", 100)
    assert 0.1 < pruned["evict_ratio_mean"] < 0.6 and full["evict_ratio_mean"] == 0


def test_folders_go_on_unless_the_function_has_changed(tmp_path):
    def score(layer, head):
        return layer.positions(head) % 7

    def run(policy):
        return kvzap.evaluate(MODEL, TASKS, [policy], evict_ratios=[0.5], output=tmp_path / "out", progress=False, **QUICK)

    first, done = run(score), []
    assert run(score).rows == first.rows
    score_again = score

    def score(layer, head):
        done.append(head)
        return layer.positions(head) % 5

    with pytest.raises(kvzap.Error, match="own_policies"):
        run(score)
    assert not done and run(score_again).rows == first.rows


def shift(alpha, layer, head):
    return layer.positions(head) % 7 - alpha


class Shift:
    def __init__(self, alpha):
        self.alpha = alpha

    def __call__(self, layer, head):
        return shift(self.alpha, layer, head)


def closure(alpha):
    return lambda layer, head: shift(alpha, layer, head)


def of_global(layer, head):
    return shift(ALPHA, layer, head)


ALPHA = 1


@pytest.mark.parametrize("make", [
    closure, Shift, lambda alpha: functools.partial(shift, alpha), lambda alpha: Shift(np.arange(3) == alpha),
    lambda alpha: Shift(alpha).__call__, lambda alpha: eval(f"lambda layer, head: shift({alpha}, layer, head)"),
    lambda alpha: types.FunctionType(of_global.__code__, {**globals(), "ALPHA": alpha}),
    lambda alpha: kvzap.ScorePolicy(closure(3), evict_ratio=0.5, recent=alpha),
    lambda alpha: kvzap.ScorePolicy(closure(3), evict_ratio=0.5, by_token=alpha == 1),
])
def test_a_function_is_what_it_computes(make):
    def identities(policy):
        return [known for _, known in _Settings([policy]).own.values()]

    first, again, other = (identities(make(alpha)) for alpha in (1, 1, 2))
    assert first[0] and first == again != other


def test_identities_are_those_of_other_processes(tmp_path):
    (tmp_path / "own.py").write_text("""
import numpy as np
SHARES, NAMES = (0.5, 0.25), {"a", "b", "c"}
def rank(values, share=(0.5, 0.25)):
    return np.argsort(values) * share[0] if "a" in {"a", "b", "c"} else share
def score(layer, head, values=None):
    values = [rank(layer.keys(head)[:, i]) for i in range(3)]
    return sum(values) + len(NAMES) * SHARES[0] + recurse(2)
def recurse(n):
    return recurse(n - 1) if n else 0
""")
    code = "import own; from kvzap._identity import identity; print(identity(own.score))"
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = []
    for seed in "1", "2":  # the second one reads the .pyc of the first one
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed, "PYTHONDONTWRITEBYTECODE": ""}
        found.append(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True,
                                    env=environment).stdout.strip())
    assert (tmp_path / "__pycache__").exists() and found[0] and found[0] == found[1]


def test_functions_without_a_known_state_do_not_go_on(tmp_path):
    def run(policy):
        return kvzap.evaluate(MODEL, TASKS, policy, output=tmp_path / "out", progress=False, **QUICK)

    def noise(seed, **name):
        generator = np.random.default_rng(seed)
        return kvzap.ScorePolicy(lambda layer, head: generator.random(layer.rows(head)), evict_ratio=0.5,
                                 **{"name": "noise", **name})

    first = run(noise(1))
    with pytest.raises(kvzap.Error, match=r"cannot tell .*; expected another output, or ScorePolicy\(..., name='lambda'"):
        rows = tmp_path / "unnamed"
        for _ in range(2):
            kvzap.evaluate(MODEL, TASKS, noise(1, name=None), output=rows, progress=False, **QUICK)
    assert run(noise(2)).rows == first.rows  # the name says so


def test_answers_are_cut_while_they_are_generated():
    text, alone = (f"knorm@evict-ratio={ratio}@decode-every=4@decode-keep=48" for ratio in ("0.5", "0"))
    rows = [row for row in kvzap.evaluate(MODEL, TASKS, [text, kvzap.Pruning.parse(text), "knorm@evict-ratio=0.5", alone, "none"],
                                          progress=False, **QUICK) if row["task"] == "all"]
    assert [row["setting"].count("decode-every") for row in rows] == [1, 0, 1, 0]  # the same setting is there once
    ends = [row["kv_bytes_at_end"] for row in rows]
    assert ends[0] < ends[1] < ends[3] and ends[2] < ends[3]


def test_errors_name_the_setting():
    def refused(policies, error=kvzap.Error, **options):
        with pytest.raises(error) as failure:
            kvzap.evaluate(MODEL, options.pop("tasks", TASKS), policies, progress=False, **{**QUICK, **options})
        assert "--" not in str(failure.value) and "\n" not in str(failure.value)
        return str(failure.value)

    assert "no-such-policy" in refused("no-such-policy", evict_ratios=0.5)
    assert "snapkv@evict-ratio=2" in refused(["none", "snapkv@evict-ratio=2"])
    assert "cuts while the answer" in refused("h2o@evict-ratio=0.5@prune-after=question@decode-every=8@decode-keep=64")
    assert "NUL" in refused(["none", "knorm\0@evict-ratio=0.5"], ValueError)
    assert "evict_ratios" in refused("knorm", evict_ratios=True)
    assert "help" in refused("none", TypeError, help=True)
    assert "tasks[1]: expected" in refused("none", TypeError, tasks=[TASKS, 5])
    assert "my --evict-ratios.jsonl" in str(pytest.raises(
        kvzap.Error, kvzap.evaluate, MODEL, "/none/my --evict-ratios.jsonl", "none", progress=False).value)
    assert "heat" in refused("none", heat=3)
    assert "evict_ratios" in refused("knorm", evict_ratios=1.5)
    assert "policies[1]: expected" in refused(["none", 5], TypeError)
    other = kvzap.ScorePolicy(lambda layer, head: None, evict_ratio=0.5, name="key_norm")
    assert "python:key_norm: two policies" in refused([key_norm, other], ValueError)
    narrow = kvzap.ScorePolicy(key_norm, evict_ratio=0.5, window=32)
    assert "window is 32; expected 64" in refused([narrow], ValueError, window=64)
    assert "window is 128; expected 32" in refused([narrow, kvzap.Pruning.parse("knorm@evict-ratio=0.5")], ValueError)


def test_exceptions_of_functions_and_of_progress_end_it():
    def wrong(layer, head):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        kvzap.evaluate(MODEL, TASKS, wrong, evict_ratios=[0.5], progress=False, **QUICK)
    with pytest.raises(ValueError, match="scores of the policy short: expected shape"):
        kvzap.evaluate(MODEL, TASKS, kvzap.ScorePolicy(lambda layer, head: [1.0], evict_ratio=0.5, name="short"),
                       progress=False, **QUICK)
    seen = []

    def progress(what, done, total):
        seen.append((what, done, total))
        if (what, done) == ("eval", 1):
            raise StopAsyncIteration

    with pytest.raises(StopAsyncIteration):
        kvzap.evaluate(MODEL, TASKS, "none", progress=progress, **QUICK)
    assert ("eval", 0, seen[-1][2]) in seen and {"load", "prefill"} & {what for what, _, _ in seen}


def test_results_that_are_no_scores_name_the_policy():
    for result, found in ((None, r"\(\d+,\), found None"), (["a"], "found list .could not convert"), ("x", "found str")):
        with pytest.raises(ValueError, match=f"scores of the policy odd: expected shape .*{found}") as failure:
            kvzap.evaluate(MODEL, TASKS, kvzap.ScorePolicy(lambda layer, head: result, evict_ratio=0.5, name="odd"),
                           progress=False, **QUICK)
        assert not failure.value.__context__
    with pytest.raises(kvzap.Error, match=r"recent_queries: .*ScorePolicy\(\.\.\., recent=n\)"):
        kvzap.evaluate(MODEL, TASKS, lambda layer, head: layer.recent_queries(), evict_ratios=0.5, progress=False, **QUICK)
    for value in (np.nan, -np.inf):
        with pytest.warns(RuntimeWarning, match="policy odd: no score of a head is finite"):
            kvzap.evaluate(MODEL, TASKS, kvzap.ScorePolicy(lambda layer, head: np.full(layer.rows(head), value),
                                                           evict_ratio=0.5, name="odd"), progress=False, **QUICK)


def test_arrays_rows_and_open_files_are_taken(tmp_path, monkeypatch):
    rows = [json.loads(line) for line in TASKS.read_text().splitlines()[:2]]
    file = tmp_path / "two.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_file = kvzap.evaluate(MODEL, file, np.array(["none", "knorm"]), evict_ratios=np.linspace(0.25, 0.5, 2), progress=False)
    assert [row["setting"] for row in of_file if row["task"] == "all"] == [
        "none", "knorm@evict-ratio=0.25", "knorm@evict-ratio=0.5"]
    monkeypatch.setenv("HOME", str(tmp_path))
    with open(file) as opened:
        for tasks, options in ((opened, {}), (rows, {}), (rows, {"output": "~/out"}), (rows, {"output": "~/out"}),
                               ("~/two.jsonl", {})):
            table = kvzap.evaluate(MODEL, tasks, ["none", "knorm"], evict_ratios=(0.25, 0.5), progress=False, **options)
            assert [row["accuracy"] for row in table] == [row["accuracy"] for row in of_file]
    assert (tmp_path / "out/summary.json").exists()
    with pytest.raises(kvzap.Error, match="other rows"):
        kvzap.evaluate(MODEL, rows[:1], "none", output=tmp_path / "out", progress=False)


def test_sparse_prefill_of_a_pruning_keeps_its_chunk():
    one, other = (kvzap.Pruning.parse(f"snapkv@evict-ratio=0.5@prefill=sparse@chunk={chunk}") for chunk in (256, 128))
    assert kvzap.evaluate(MODEL, TASKS, one, progress=False, **QUICK)
    with pytest.raises(ValueError, match="chunk is 128; expected 256"):
        kvzap.evaluate(MODEL, TASKS, [one, other], progress=False, **QUICK)


def test_notes_of_the_command_line_are_warnings():
    with pytest.warns(UserWarning, match=r"seed \d+"):
        kvzap.evaluate(MODEL, TASKS, "none", seed=-1, progress=False, **QUICK)


def test_ctrl_c_ends_it():
    def interrupt(what, done, total):
        if what == "eval":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        kvzap.evaluate(MODEL, TASKS, "none", progress=interrupt, **QUICK)
    assert len(kvzap.evaluate(MODEL, TASKS, "none", progress=False, **QUICK))


def test_the_interpreter_ends_while_a_daemon_thread_evaluates(tmp_path):
    code = f"""
import threading, kvzap
begun = threading.Event()
def progress(what, done, total):
    begun.set()
policies = [f"knorm@evict-ratio={{i / 100}}" for i in range(1, 90)]
threading.Thread(target=lambda: kvzap.evaluate({str(MODEL)!r}, {str(TASKS)!r}, policies, progress=progress),
                 daemon=True).start()
begun.wait()
"""
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "TMPDIR": str(tmp_path), "KOKKOS_DISABLE_WARNINGS": "1"})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert os.listdir(tmp_path) == [] and time.monotonic() - begin < 60


def test_files_are_read_where_the_locale_s_encoding_is_ascii():
    code = f"""
import kvzap, locale
task = [{{"task": chr(246), "context": "Ein Text.", "question": "?", "answer": [chr(246)]}}]
table = kvzap.evaluate({str(MODEL)!r}, task, "none", progress=False, n_predict=2)
assert table[0]["task"] == chr(246) and "UTF" not in locale.nl_langinfo(locale.CODESET)
"""
    done = subprocess.run([sys.executable, "-X", "utf8=0", "-c", code], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "KOKKOS_DISABLE_WARNINGS": "1"})
    assert done.returncode == 0, done.stderr


def test_progress_is_a_line_without_tqdm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ZeroDivisionError) as failure:
        kvzap.evaluate(MODEL, TASKS, lambda layer, head: 1 / 0, evict_ratios=0.5, **QUICK)
    assert failure.value.__context__ is None
    table = kvzap.evaluate(MODEL, TASKS, "none", **QUICK)
    prompts = next(row["prompts"] for row in table if row["task"] == "all")
    assert f"kvzap.evaluate: {prompts} of {prompts} prompts\n" in capsys.readouterr().err
