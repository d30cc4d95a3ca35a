"""The host's locale changes nothing: here with a comma as the decimal point."""
import locale

import kvzap
import pytest
from conftest import MODEL, SURROGATE, THRESHOLD


@pytest.fixture
def comma():
    before = locale.setlocale(locale.LC_ALL)
    try:
        locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")  # ctest sets LOCPATH
    except locale.Error:
        pytest.skip("the machine lacks the locale de_DE.UTF-8; install the package 'locales' and build again")
    assert locale.localeconv()["decimal_point"] == ","
    yield
    locale.setlocale(locale.LC_ALL, before)


def test_settings_are_read_and_printed_with_points(comma):
    pruning = kvzap.Pruning.parse("snapkv:window=4+ada:alpha=0.25@evict-ratio=0.5")
    assert pruning == kvzap.Pruning.policy("snapkv:window=4+ada:alpha=0.25", evict_ratio=0.5)
    assert str(pruning) == "snapkv:window=4+ada:alpha=0.25@evict-ratio=0.5"
    with pytest.raises(kvzap.Error, match="0,5"):
        kvzap.Pruning.parse("snapkv@evict-ratio=0,5")


def test_answers_are_those_of_the_goldens(comma, golden):
    options = {"max_new_tokens": golden["max_new_tokens"]}
    by_number = kvzap.Pruning.kvzap(SURROGATE, threshold=THRESHOLD)
    for pruning in (by_number, str(by_number)):
        chat = kvzap.LLM(MODEL, pruning, dtype="f32").session().read(golden["context"])
        assert chat.ask(golden["question"], **options) == golden["pruned"]
    half = kvzap.LLM(MODEL, "snapkv@evict-ratio=0.5", dtype="f32").session().read(golden["context"])
    assert 0.45 < half.report.evict_ratio < 0.55
