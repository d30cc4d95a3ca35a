"""Arguments, values and their errors; calls that wait; plots."""
import copy
import functools
import pickle
import signal
import time

import kvzap
import numpy as np
import pytest
from conftest import MODEL, SURROGATE
from test_llm import run


def newest(layer, head):
    return layer.positions(head)


def test_queries_are_at_most_those_of_the_longest_context(golden):
    for recent in (2**31, 2**40, 10**8):
        policy = kvzap.ScorePolicy(lambda layer, head: np.full(layer.rows(head), len(layer.recent_queries())),
                                   evict_ratio=0.5, recent=recent)
        chat = kvzap.LLM(MODEL, policy).session().read(golden["context"])
        assert chat.scores(0, 0)[0] == golden["n_context"]
    with pytest.raises(ValueError, match="recent is -1; expected 0 or more"):
        kvzap.ScorePolicy(newest, evict_ratio=0.5, recent=-1)


@pytest.mark.parametrize("call, text", [
    (lambda llm: llm.session().read("A.").ask(5), "question: expected a text, found int"),
    (lambda llm: llm.session().read("A.").ask("?", max_new_tokens=None), "max_new_tokens: expected a whole number, found None"),
    (lambda llm: llm.session().read("A.").ask("?", max_new_tokens=2**70), f"max_new_tokens: .* found {2**70}"),
    (lambda llm: llm.session().read("A.").ask("?", on_text=5), "on_text: expected a function, found int"),
    (lambda llm: llm.session().read("A.").positions("x", 0), "layer: expected a whole number, found str"),
    (lambda llm: llm.encode(None), "text: expected a text, found None"),
    (lambda llm: llm.decode([0.5]), "ids: expected token ids"),
    (lambda llm: kvzap.LLM(5), "model: expected a path, found int"),
    (lambda llm: kvzap.open_snapshot(None), "path: expected a path, found NoneType"),
    (lambda llm: kvzap.evaluate(MODEL, [{"context": np.float32(1)}], "none"), r"tasks\[0\]: .*float32 is not JSON"),
    (lambda llm: kvzap.evaluate(MODEL, [{"context": ""}, 3], "none"), r"tasks\[1\]: expected a dict, as tasks\[0\] is"),
    (lambda llm: kvzap.LLM(MODEL, dtype=5), "dtype: expected a text, found int"),
    (lambda llm: kvzap.LLM(MODEL, threads="2"), "threads: expected a whole number, found str"),
    (lambda llm: kvzap.Pruning.parse(None), "text: expected a policy's text, found None"),
    (lambda llm: kvzap.Pruning.kvzap(5), "surrogate: expected a path, found int"),
    (lambda llm: kvzap.Pruning.policy("knorm", evict_ratio="0.5"), "evict_ratio: expected a number, found str"),
    (lambda llm: kvzap.ScorePolicy(None, evict_ratio=0.5), "function: expected a function, found None"),
    (lambda llm: kvzap.ScorePolicy(newest, evict_ratio="0.5"), "evict_ratio: expected a number, found str"),
    (lambda llm: kvzap.ScorePolicy(newest, evict_ratio=0.5, recent=None), "recent: expected a whole number, found None"),
    (lambda llm: llm.session().ask(max_tokens=5), "ask: .*'max_tokens'; kvzap's is max_new_tokens"),
    (lambda llm: llm.session().stream(temp=1), "stream: .*'temp'; kvzap's is temperature"),
    (lambda llm: llm.session().ask(stop=["."]), "'stop'; kvzap's is on_text"),
    (lambda llm: llm.generate(["A."], do_sample=True), "generate: .*'do_sample'; kvzap's is temperature"),
    (lambda llm: kvzap.LLM(MODEL, max_new_tokens=5), "LLM: .*; kvzap's is max_new_tokens of ask"),
    (lambda llm: kvzap.LLM(MODEL, device="cuda"), "LLM: .*'device'"),
    (lambda llm: kvzap.LLM(MODEL, tempurature=1), "did you mean temperature"),
])
def test_wrong_arguments_are_named_in_one_line(llm, call, text):
    with pytest.raises(TypeError, match=text) as failure:
        call(llm)
    assert "\n" not in str(failure.value)


def test_indices_and_threads_have_ranges(chat):
    for layer, head in ((2**70, 0), (0, 2**70), (0, -1)):
        with pytest.raises(IndexError, match=r"(layer|head) is .*; expected 0 to \d"):
            chat.positions(layer, head)
    with pytest.raises(kvzap.Error, match="threads is 1000000; expected 1 to 4096, or 0"):
        kvzap.LLM(MODEL, threads=10**6)


def test_minus_one_is_as_in_the_program(llm, golden):
    chat = llm.session().read(golden["context"])
    assert chat.ask(golden["question"], max_new_tokens=-1) == golden["pruned"] and not chat.report.is_cut
    narrow = kvzap.LLM(MODEL, dtype="f32", max_context=golden["n_context"] + 60, temperature=3)
    answers = narrow.generate([(golden["context"], "?"), ("A.", "?")], max_new_tokens=-1, seed=-1, temperature=1.0)
    assert "max_new_tokens" not in answers.stop_reasons
    chat = llm.session().read("A text.")
    assert len({chat.ask("?", seed=-1, temperature=5.0, max_new_tokens=16) for _ in range(4)}) > 1


def test_cut_answers_of_many_prompts(llm, golden):
    pair = (golden["context"], golden["question"])
    whole, cut = (llm.generate([pair], max_new_tokens=count) for count in (golden["max_new_tokens"], 2))
    assert (whole, whole.stop_reasons, whole.is_cut) == ([golden["pruned"]], ["stop_id"], [False])
    assert (cut.stop_reasons, cut.is_cut) == (["max_new_tokens"], [True])


def test_values_can_be_copied_and_pickled():
    pruning = kvzap.Pruning.kvzap("a@b+c", threshold=-4, window=32)
    policy = kvzap.ScorePolicy(functools.partial(newest), threshold=0.1, window=7, sink=3, recent=5, by_token=True, name="own")
    for twice in (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        assert twice(pruning) == pruning and twice(kvzap.Pruning.none()) == kvzap.Pruning.none()
        assert twice(kvzap.press("knorm", evict_ratio=0.5)) == kvzap.press("knorm", evict_ratio=0.5)
        for one, other in ((twice(policy), policy), (twice(kvzap.Press(policy)).pruning, policy)):
            assert (str(one), one.name, one._kind) == (str(other), other.name, other._kind)
    unnamed = copy.copy(kvzap.ScorePolicy(newest, evict_ratio=0.5))
    assert unnamed.name == "newest" and unnamed.function is newest and not unnamed._is_named


def test_reports_are_compared_by_identity(chat):
    report = chat.report
    assert report == report and report != chat.report and report in {report}


def test_closed_objects_say_what_they_are(chat, tmp_path):
    chat.save(tmp_path / "a.h5")
    snapshot = kvzap.open_snapshot(tmp_path / "a.h5")
    snapshot.positions(0, 0)
    snapshot.close()
    for call in (lambda: snapshot.keys(0, 0), lambda: snapshot.positions(0, 0), lambda: snapshot.kept):
        with pytest.raises(kvzap.Error, match="a.h5: the snapshot is closed"):
            call()
    closed = kvzap.LLM(MODEL / "config.json")
    assert repr(closed).startswith("<kvzap.LLM recall-4m:")
    closed.close()
    with pytest.raises(kvzap.Error, match="the LLM is closed"):
        closed.session()


def test_snapshots_name_the_version_and_paths_may_begin_with_the_home(chat, llm, tmp_path, monkeypatch):
    import h5py

    monkeypatch.setenv("HOME", str(tmp_path))
    chat.save("~/a.h5")
    assert h5py.File(tmp_path / "a.h5").attrs["kvzap_version"] in (kvzap.__version__, kvzap.__version__.encode())
    assert llm.resume("~/a.h5").report.context_tokens == kvzap.open_snapshot("~/a.h5").tokens
    (tmp_path / "model").symlink_to(MODEL)
    (tmp_path / "surrogate").symlink_to(SURROGATE)
    assert str(tmp_path) in str(kvzap.Pruning.kvzap("~/surrogate", threshold=-4))
    assert kvzap.LLM("~/model", kvzap.Pruning.kvzap("~/surrogate", threshold=-4)).session()
    assert kvzap.plot.snapshot("~/a.h5", kind="kept").axes
    pruning = kvzap.press("kvzap", threshold=-4, surrogate="~/surrogate").pruning
    assert f"surrogate={tmp_path}/surrogate" in str(pruning)


def test_plots_leave_nothing_behind_and_name_keywords(chat, tmp_path):
    from matplotlib import pyplot

    chat.save(tmp_path / "a.h5")
    for _ in range(3):
        kvzap.plot.snapshot(tmp_path / "a.h5", kind="kept").savefig(tmp_path / "a.png")
    assert pyplot.get_fignums() == []
    assert kvzap.plot.snapshot(tmp_path / "a.h5", kind="text").startswith("<!doctype html>")
    for options, text in (({"kind": "pie"}, "argument kind: invalid choice"), ({"bins": 0}, "bins: expected at least 1"),
                          ({"size": "3"}, "size: expected")):
        with pytest.raises(kvzap.Error, match=text) as failure:
            kvzap.plot.snapshot(tmp_path / "a.h5", **options)
        assert "--" not in str(failure.value)
    with pytest.raises(TypeError, match="help"):
        kvzap.plot.snapshot(tmp_path / "a.h5", help=True)


def test_ctrl_c_ends_a_call_that_waits_for_another_thread():
    process = run("""
        import threading
        chat, other = (kvzap.LLM(MODEL).session().read("A long text.") for _ in range(2))
        begun, end = threading.Event(), threading.Event()
        def piece(text):
            begun.set()
            return not end.wait(60)
        worker = threading.Thread(target=lambda: chat.ask("What?", on_text=piece))
        worker.start()
        begun.wait()
        print(repr(other), flush=True)
        try:
            other.ask("What?")
        except KeyboardInterrupt:
            print("interrupted")
        end.set()
        worker.join()
        print(len(other.ask("What?", max_new_tokens=1)) >= 0)
        """)
    assert process.stdout.readline().startswith("<kvzap.Session")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=50)
    assert (out, process.returncode) == ("interrupted\nTrue\n", 0), err


def test_cycles_of_policies_leave_no_report_at_exit():
    process = run("""
        def make():
            def score(layer, head):
                return policy.window
            policy = kvzap.ScorePolicy(score, evict_ratio=0.5)
            score.llm = kvzap.LLM(MODEL, policy)
        make()
        """)
    assert (process.communicate(timeout=120), process.returncode) == (("", ""), 0)


def test_amounts_and_wrappers_of_presses():
    with pytest.raises(kvzap.PruningError, match="both snapkv@evict-ratio=0.5 and evict_ratio give") as failure:
        kvzap.press("snapkv@evict-ratio=0.5", evict_ratio=0.9)
    with pytest.raises(kvzap.PruningError, match="both threshold and evict_ratio give"):
        kvzap.Pruning.kvzap("surrogate", threshold=-4, evict_ratio=0.5)
    assert failure.value.code == "several_amounts"
    with pytest.raises(kvzap.Error, match=r'AdaKVPress: .*"snapkv\+ada"'):
        kvzap.press("AdaKVPress", compression_ratio=0.5)


def test_merging_presses_are_a_modifier():
    class KnormPress:
        compression_ratio = 0.5

    class MergingPress:
        press = KnormPress()
        similarity_threshold = 0.3
        merge_fraction = 0.75

    pruning = kvzap.from_press(MergingPress())
    assert pruning == kvzap.Pruning.parse("knorm+merge:similarity=0.3,fraction=0.75@evict-ratio=0.5")


def test_cache_merging_presses_are_a_modifier_of_decode_cuts():
    class KnormPress:
        compression_ratio = 0.5

    class CAMPress:
        base_press = KnormPress()
        compression_interval = 16
        target_size = 64
        merge_budget = 8

    class PrefillDecodingPress:
        prefilling_press = KnormPress()
        decoding_press = CAMPress()

    cuts = "@decode-every=16@decode-keep=64"
    assert kvzap.from_press(CAMPress()) == kvzap.Pruning.parse("knorm+cam:window=8@evict-ratio=0" + cuts)
    assert kvzap.from_press(PrefillDecodingPress()) == kvzap.Pruning.parse("knorm+cam:window=8@evict-ratio=0.5" + cuts)
    with pytest.raises(kvzap.PruningError, match="needs decode_every") as failure:
        kvzap.Pruning.parse("knorm+cam@evict-ratio=0.5")._check()
    assert failure.value.code == "missing"
