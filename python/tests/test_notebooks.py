"""The code cells of docs/notebooks run, in order, where a reader starts them."""
import importlib.util
import json

import pytest
from conftest import ROOT

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, monkeypatch, capsys):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    if any("import transformers" in source for source in sources) and not importlib.util.find_spec("transformers"):
        pytest.skip("needs transformers")
    assert all(not cell["outputs"] for cell in cells), "clear the outputs before a commit"
    monkeypatch.chdir(path.parent)
    names = {"__name__": "__main__"}
    for number, source in enumerate(sources):
        exec(compile(source, f"{path.name}, cell {number}", "exec"), names)
    assert capsys.readouterr().out
