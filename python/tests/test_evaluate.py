"""kvzap.evaluate: the numbers of `kvzap eval`, and policies that are functions."""
import json
import os
import signal
import subprocess
import sys

import kvzap
import kvzap._program
import numpy as np
import pytest
from conftest import MODEL, ROOT, SURROGATE

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


def test_errors_name_the_setting():
    def refused(policies, error=kvzap.Error, **options):
        with pytest.raises(error) as failure:
            kvzap.evaluate(MODEL, TASKS, policies, progress=False, **{**QUICK, **options})
        assert "--" not in str(failure.value) and "\n" not in str(failure.value)
        return str(failure.value)

    assert "no-such-policy" in refused("no-such-policy", evict_ratios=0.5)
    assert "snapkv@evict-ratio=2" in refused(["none", "snapkv@evict-ratio=2"])
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


def test_ctrl_c_ends_it():
    def interrupt(what, done, total):
        if what == "eval":
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        kvzap.evaluate(MODEL, TASKS, "none", progress=interrupt, **QUICK)
    assert len(kvzap.evaluate(MODEL, TASKS, "none", progress=False, **QUICK))


def test_progress_is_a_line_without_tqdm(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    table = kvzap.evaluate(MODEL, TASKS, "none", **QUICK)
    prompts = next(row["prompts"] for row in table if row["task"] == "all")
    assert f"kvzap.evaluate: {prompts} of {prompts} prompts\n" in capsys.readouterr().err
