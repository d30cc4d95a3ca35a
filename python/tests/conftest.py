import json
import os
import pathlib

import pytest

ROOT = pathlib.Path(os.environ.get("KVZAP_SOURCE_DIR", pathlib.Path(__file__).resolve().parents[2]))
MODEL = ROOT / "inputs/models/recall-4m"
SURROGATE = ROOT / "inputs/models/kvzap-mlp-recall-4m"
THRESHOLD = -4.3


@pytest.fixture(scope="session")
def golden():
    """A context, a question and the answers of transformers and kvpress in f32."""
    case = json.loads((ROOT / "tests/golden/recall-4m.json").read_text())[0]
    case["full"] = case["runs"]["full"]["text"]
    case["pruned"] = case["runs"][f"kvzap-mlp.tau{THRESHOLD}.w128.prefill"]["text"]
    return case


@pytest.fixture(scope="session")
def llm():
    import kvzap

    pruning = kvzap.Pruning.kvzap(SURROGATE, threshold=THRESHOLD)
    return kvzap.LLM(MODEL, pruning, dtype="f32")


@pytest.fixture
def chat(llm, golden):
    with llm.session() as session:
        yield session.read(golden["context"])
