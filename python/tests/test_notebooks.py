"""The notebooks of docs/notebooks: stored outputs, which are those of the cells, and right answers."""
import contextlib
import importlib.util
import io
import json
import re

import pytest
from conftest import ROOT

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
ANSWER = "The special magic number for delta is 0507."


def cells_of(path):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def printed(cell):
    """What a cell has stored of its standard output."""
    return "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")


def answers(text):
    """Sentences with a magic number, and answers in quotation marks."""
    return re.findall(r"The special magic number for \w+ is \w+\.|''", text)


def test_there_are_notebooks():
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stored_and_right(path):
    cells = cells_of(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run all cells, in order"
    assert any(output.get("data", {}).get("text/html") for cell in cells for output in cell["outputs"])
    for cell in cells:
        assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in cell["outputs"])
        assert not re.search(r"(?<![\w.<])/\w+/\w|0x[0-9a-f]{6}", json.dumps(cell["outputs"])), "a path or an address"
    found = [answer for cell in cells for answer in answers(printed(cell))]
    assert len(found) >= 4 and set(found) == {ANSWER}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_give_the_stored_answers(path, monkeypatch):
    cells = cells_of(path)
    sources = ["".join(cell["source"]) for cell in cells]
    if any("import transformers" in source for source in sources) and not importlib.util.find_spec("transformers"):
        pytest.skip("needs transformers")
    monkeypatch.chdir(path.parent)
    names = {"__name__": "__main__"}
    for number, (cell, source) in enumerate(zip(cells, sources)):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(source, f"{path.name}, cell {number}", "exec"), names)
        assert answers(out.getvalue()) == answers(printed(cell)), f"cell {number}"
        assert len(out.getvalue().splitlines()) == len(printed(cell).splitlines()), f"cell {number}"
