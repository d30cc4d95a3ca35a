"""Budgets of heads: learnt from reports, and kept by +per-head."""
import dataclasses
import json

import kvzap
import numpy as np
import pytest
from conftest import MODEL


@pytest.fixture(scope="module")
def texts(golden_text):
    half = len(golden_text) // 2
    return [golden_text, golden_text[:half], golden_text[half:]]


@pytest.fixture(scope="module")
def golden_text(golden):
    return golden["context"]


def test_learnt_ratios_are_kept(texts, tmp_path):
    policy = kvzap.LLM(MODEL, "knorm+global@evict-ratio=0.6", dtype="f32")
    reports = []
    for text in texts:
        with policy.session() as chat:
            reports.append(chat.read(text).report)
    file = tmp_path / "heads.json"
    ratios = kvzap.head_ratios(reports, file)
    assert ratios.shape == reports[0].kept.shape
    assert ratios == pytest.approx(1 - np.mean([report.kept / report.tokens for report in reports], axis=0), abs=1e-6)
    assert ratios.mean() == pytest.approx(0.6, abs=0.01)
    assert ratios.std() > 0.01  # heads differ
    assert json.loads(file.read_text()) == ratios.tolist()
    with kvzap.LLM(MODEL, f"knorm+per-head:ratios={file}", dtype="f32").session() as chat:
        for text in texts:
            report = chat.read(text).report
            shares = np.maximum(1, (1 - ratios) * report.tokens)  # each head keeps a row
            assert (abs(report.kept - shares) <= 1).all()
            assert (abs(report.kept.sum(axis=1) - shares.sum(axis=1)) <= 0.51).all()
            layer, head = divmod(int(report.kept.argmax()), report.kept.shape[1])
            positions = chat.positions(layer, head)
            assert positions[-1] == report.tokens - 1  # window=1
            assert positions[:4].tolist() == [0, 1, 2, 3]  # sink=4


def test_arrays_and_curves_are_files(texts, tmp_path):
    with kvzap.LLM(MODEL, "knorm+global@evict-ratio=0.5", dtype="f32").session() as chat:
        ratios = kvzap.head_ratios([chat.read(texts[0]).report])
    np.save(tmp_path / "heads.npy", ratios)
    scale = np.arange(1, 100)[:, None, None] / 50
    np.save(tmp_path / "curve.npy", np.clip(scale * ratios, 0, 1).astype(np.float32))
    kept = []
    for policy in (f"knorm+per-head:ratios={tmp_path}/heads.npy", f"knorm+per-head:curve={tmp_path}/curve.npy@evict-ratio=0.5"):
        with kvzap.LLM(MODEL, policy, dtype="f32").session() as chat:
            kept.append(chat.read(texts[0]).report.kept)
    assert (kept[0] == kept[1]).all()


def test_files_of_reports(texts, tmp_path):
    rows = [[5, 10], [0, 2]]
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"format": "kvzap.run", "format_version": 1, "answers": [],
                                "context": {"tokens": 10, "kept_rows": rows}}))
    assert kvzap.head_ratios([file, str(file)]).tolist() == [[0.5, 0], [1, 0.8]]
    with kvzap.LLM(MODEL, "knorm@evict-ratio=0.5", dtype="f32").session() as chat:
        report = chat.read(texts[1]).report
    with pytest.raises(kvzap.Error, match=r"reports\[1\]: kept_rows: expected 2 layers of 2 KV heads as in .*run.json"):
        kvzap.head_ratios([file, report])
    for kept in (report.kept + report.tokens, report.kept - report.tokens):
        with pytest.raises(kvzap.Error, match=rf"reports\[0\]: kept_rows: expected 0 to {report.tokens} rows"):
            kvzap.head_ratios([dataclasses.replace(report, kept=kept)])


def test_bad_input(tmp_path):
    with pytest.raises(kvzap.Error, match="reports: expected one or more, found none"):
        kvzap.head_ratios([])
    with pytest.raises(TypeError, match=r"reports\[0\]: expected a Report or a file, found int"):
        kvzap.head_ratios([3])
    for one in ("run.json", tmp_path / "run.json"):
        with pytest.raises(TypeError, match="reports: expected a list of reports or files, found"):
            kvzap.head_ratios(one)
    with pytest.raises(kvzap.Error, match="none.json"):
        kvzap.head_ratios([tmp_path / "none.json"])
    (tmp_path / "text").write_text("no report")
    with pytest.raises(kvzap.Error, match="text: not JSON"):
        kvzap.head_ratios([tmp_path / "text"])


def stand_in(name, **fields):
    return type(name, (), fields)()


def test_press_of_kvpress(tmp_path):
    inner = stand_in("SnapKVPress", window_size=32, kernel_size=5, compression_ratio=0.0)
    press = stand_in("LUKVPress", press=inner, compression_ratio=0.4, sink=2, window=7)
    pruning = kvzap.from_press(press, curve="a,b.npy")
    expected = "snapkv:window=32,kernel=5+per-head:curve=a\\,b.npy,sink=2,window=7@evict-ratio=0.4"
    assert pruning == kvzap.Pruning.parse(expected)
    with pytest.raises(kvzap.Error, match=r"LUKVPress: .* from_press\(press, curve=FILE\)"):
        kvzap.from_press(press)
