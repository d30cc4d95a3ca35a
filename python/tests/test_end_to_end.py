"""kvzap.train_end_to_end: gates against the engine's eviction, and trainings of the demo model."""
import json

import pytest
from conftest import MODEL, ROOT, SURROGATE, THRESHOLD

import kvzap

try:
    import torch
    import transformers
except ImportError:
    torch = None

with_torch = pytest.mark.skipif(torch is None, reason="needs torch and transformers: pip install torch transformers")
WINDOW = 16


@pytest.mark.skipif(torch is not None, reason="torch is installed")
def test_says_what_it_needs():
    with pytest.raises(kvzap.Error, match=r"expected torch and transformers: pip install 'kvzap\[transformers\]'"):
        kvzap.train_end_to_end  # noqa: B018


def load(folder, kind="AutoModelForCausalLM", **options):
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32, **options).eval()


@pytest.fixture(scope="module")
def model():
    return load(MODEL)


@pytest.fixture(scope="module")
def texts():
    lines = (ROOT / "inputs/eval/recall-1024.jsonl").read_text().splitlines()[:4]
    return [json.loads(line)["context"] for line in lines]


@pytest.fixture(scope="module")
def samples(texts):
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    return kvzap.recall_samples(tokenizer, texts, 4, tokens=240, seed=3)


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """The demo model's surrogate with heads' scores moved up and down."""
    from kvzap._end_to_end import _Surrogate

    folder = tmp_path_factory.mktemp("spoiled")
    surrogate = _Surrogate(SURROGATE)
    with torch.no_grad():
        surrogate.shift.copy_(3 * torch.randn(surrogate.shift.shape, generator=torch.Generator().manual_seed(0)))
    surrogate.save(folder)
    return folder


@with_torch
def test_samples_are_answered_by_their_context(samples, texts):
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    again = kvzap.recall_samples(tokenizer, texts, 4, tokens=240, seed=3)
    assert [(one.context, one.questions) for one in again] == [(one.context, one.questions) for one in samples]
    for sample in samples:
        context = tokenizer.decode(sample.context)
        question, answer = sample.questions[0]
        for value in tokenizer.decode(answer, skip_special_tokens=True).split(","):
            assert value.strip() in context
    with pytest.raises(kvzap.Error, match="texts of at least 260 tokens"):
        kvzap.recall_samples(tokenizer, ["short"], 1, tokens=240)


@with_torch
def test_samples_need_tokens():
    with pytest.raises(ValueError, match="expected a context and questions"):
        kvzap.Sample([1, 2], [([3], [])])


@with_torch
def test_gates_of_temperature_0_are_the_engines_eviction(model, samples):
    from kvzap._end_to_end import _Student, _Surrogate, log_gates

    sample = kvzap.Sample(samples[0].context, samples[0].questions[:1])
    student = _Student(model, 0)
    prepared = student.prepare(sample)
    scores = _Surrogate(SURROGATE)(prepared.hidden).detach()
    hard = log_gates(scores, torch.tensor(THRESHOLD), 0, WINDOW, 0.0)
    soft = log_gates(scores, torch.tensor(THRESHOLD), 0, WINDOW, 1e-6)
    assert torch.allclose(soft.exp(), hard.exp(), atol=1e-3)
    assert 0.2 < float((hard == 0).float().mean()) < 0.8
    with torch.no_grad():
        ours = student.logits(sample, prepared, hard)
        model.set_attn_implementation("kvzap")
        try:
            cache = kvzap.Cache(model.config, f"kvzap@surrogate={SURROGATE}@threshold={THRESHOLD}@window={WINDOW}")
            model(torch.tensor([sample.context]), past_key_values=cache)
            question, answer = sample.questions[0]
            logits = model(torch.tensor([[*question, *answer]]), past_key_values=cache).logits[0]
        finally:
            model.set_attn_implementation("sdpa")
    assert int((hard == 0).sum()) == sum(len(cache.positions(layer, head)) - len(question) - len(answer)
                                         for layer in range(hard.shape[0]) for head in range(hard.shape[1]))
    assert torch.allclose(ours, logits[sample.predicting()], atol=1e-3, rtol=1e-3)


@with_torch
@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_open_gates_are_the_full_cache(name):
    """Soft caps, sinks, layers with windows, groups of query heads."""
    from kvzap._end_to_end import _Student

    folder = ROOT / "tests/golden/families" / name
    if not folder.exists():
        pytest.skip(f"no random model {name}")
    kind = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = load(folder, kind, attn_implementation="eager", experts_implementation="eager")
    context, other, asked = list(range(3, 63)), [70, 71, 72], list(range(80, 90))
    sample = kvzap.Sample(context, [(other, [73]), (asked[:4], asked[4:])])
    student = _Student(model, 0)
    logits = student.prepare(sample).logits
    with torch.no_grad():
        expected = model(torch.tensor([context + asked])).logits[0]
    assert torch.allclose(logits[1:], expected[len(context) + 3:-1], atol=1e-4, rtol=1e-4)


@with_torch
def test_gradient_of_an_opening_is_the_change_if_the_pair_came_back():
    from kvzap import _end_to_end

    torch.manual_seed(0)
    context, tokens, kv_heads, heads, size = 12, 3, 2, 4, 8
    query, upstream = torch.randn(1, heads, tokens, size), torch.randn(1, tokens, heads, size)
    key, value = torch.randn(2, 1, kv_heads, context + tokens, size)
    hard = torch.zeros(1, kv_heads, context).masked_fill(torch.rand(1, kv_heads, context) < 0.5, -torch.inf)

    class Layer:
        layer_idx = 0

    def output(log_gates, openings=None):
        _end_to_end._now.gates = _end_to_end._Gates(context, [tokens], log_gates, openings, torch.device("cpu"))
        return (_end_to_end._gated_attention(Layer, query, key, value, None)[0] * upstream).sum()

    openings = torch.zeros_like(hard, requires_grad=True)
    pruned = output(hard, openings)
    assert float(pruned.detach()) == pytest.approx(float(output(hard)))
    pruned.backward()
    for head, pair in (hard[0] < 0).nonzero():
        back = hard.clone()
        back[0, head, pair] = 0
        assert float(openings.grad[0, head, pair]) == pytest.approx(float(output(back) - output(hard)), abs=1e-5)


@with_torch
@pytest.mark.parametrize("gates, learn", [("hard", "all"), ("hard", "heads"), ("soft", "heads")])
def test_loss_falls(model, samples, spoiled, tmp_path, gates, learn):
    log = kvzap.train_end_to_end(model, spoiled, samples[:2], tmp_path, steps=12, batch=2, keep=(0.3, 0.3), window=WINDOW, gates=gates,
                                 learn=learn, head_rate=0.5, rate=1e-3, validation=samples[:2], validation_keep=(0.3,), save_every=12)
    assert [entry["step"] for entry in log] == list(range(13))
    assert json.loads((tmp_path / "training.json").read_text())["log"] == log
    assert log[-1]["loss"] < 0.9 * log[1]["loss"]
    if gates == "hard":
        assert log[1]["loss"] == pytest.approx(log[0]["validation"]["0.3"], rel=1e-4)
        assert log[-1]["validation"]["0.3"] < 0.9 * log[0]["validation"]["0.3"]


@with_torch
def test_interrupted_training_ends_with_the_same_weights(model, samples, tmp_path):
    options = {"steps": 5, "batch": 2, "window": WINDOW, "learn": "all", "save_every": 2}
    whole = kvzap.train_end_to_end(model, SURROGATE, samples, tmp_path / "whole", **options)

    def interrupt(entry):
        if entry["step"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kvzap.train_end_to_end(model, SURROGATE, samples, tmp_path / "parts", progress=interrupt, **options)
    steps = []
    log = kvzap.train_end_to_end(model, SURROGATE, samples, tmp_path / "parts", progress=lambda entry: steps.append(entry["step"]),
                                 **options)
    assert steps == [3, 4, 5] and log == whole
    assert (tmp_path / "parts/model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
    with pytest.raises(kvzap.Error, match="began with steps=5, found steps=6"):
        kvzap.train_end_to_end(model, SURROGATE, samples, tmp_path / "parts", **{**options, "steps": 6})
    with pytest.raises(kvzap.Error, match="began with samples=4, found samples=3"):
        kvzap.train_end_to_end(model, SURROGATE, samples[:3], tmp_path / "parts", **options)
    (tmp_path / "parts/state.pt").write_bytes(b"damaged")
    with pytest.raises(kvzap.Error, match="state.pt: expected the state of an interrupted training"):
        kvzap.train_end_to_end(model, SURROGATE, samples, tmp_path / "parts", **options)


@with_torch
def test_folder_loads_elsewhere(model, samples, tmp_path):
    from kvzap._end_to_end import _Student, _Surrogate

    kvzap.train_end_to_end(model, SURROGATE, samples, tmp_path, steps=2, batch=1, window=WINDOW, head_rate=0.5)
    hidden = _Student(model, 0).prepare(samples[0]).hidden
    scores = _Surrogate(tmp_path)(hidden).detach()
    assert not torch.allclose(scores, _Surrogate(SURROGATE)(hidden), atol=0.05)
    llm = kvzap.LLM(MODEL, kvzap.Pruning.kvzap(tmp_path, threshold=THRESHOLD, window=WINDOW), dtype="f32")
    with llm.session() as session:
        session.read(list(samples[0].context))
        for layer, head in ((0, 0), (2, 1)):
            kept = session.positions(layer, head)
            judged = kept[kept < len(samples[0].context) - WINDOW]
            own = session.scores(layer, head)[:len(judged)]
            assert torch.allclose(torch.as_tensor(own), scores[layer, head, judged], atol=1e-3)


@with_torch
def test_blend_lies_between_both_surrogates(spoiled, tmp_path):
    from kvzap._end_to_end import _Surrogate

    first, last = _Surrogate(SURROGATE), _Surrogate(spoiled)
    last.save(tmp_path, first.folded(), 0.25)
    for one, other, found in zip(first.folded(), last.folded(), _Surrogate(tmp_path).folded()):
        assert torch.allclose(found, 0.75 * one + 0.25 * other, atol=0.02, rtol=0.01)


@with_torch
def test_kvpress_loads_the_folder(model, samples, spoiled):
    from kvzap._end_to_end import _Student, _Surrogate

    kvpress = pytest.importorskip("kvpress.presses.kvzap_press", reason="needs kvpress")
    hidden = _Student(model, 0).prepare(samples[0]).hidden
    scores = _Surrogate(spoiled)(hidden).detach()
    press = kvpress.KVzapModel.from_pretrained(spoiled).float()
    assert torch.allclose(press(hidden.transpose(0, 1)).permute(1, 2, 0), scores, atol=1e-4)


@with_torch
@pytest.mark.parametrize("options, message", [
    ({"keep": (0.5, 0.2)}, "keep: expected two shares between 0 and 1, the smaller first, found .0.5, 0.2."),
    ({"learn": "none"}, 'learn: expected "heads" or "all", found none'),
    ({"gates": "open"}, 'gates: expected "hard" or "soft", found open'),
    ({"blend": 0}, "blend: expected above 0 and at most 1, found 0"),
    ({"steps": 0}, "steps: expected at least 1, found 0"),
    ({"temperature": 0.0}, "temperature: expected a positive number, found 0.0"),
    ({"window": 1000}, "expected contexts of more than sink . window = 1000 tokens"),
])
def test_wrong_options(model, samples, tmp_path, options, message):
    with pytest.raises((ValueError, kvzap.Error), match=message):
        kvzap.train_end_to_end(model, SURROGATE, samples, tmp_path, **options)


@with_torch
def test_wrong_surrogate_and_model(model, samples, tmp_path):
    with pytest.raises(kvzap.Error, match="expected a surrogate of kvzap train or kvpress"):
        kvzap.train_end_to_end(model, tmp_path / "none", samples, tmp_path)
    with pytest.raises(kvzap.Error, match="expected scores of"):
        kvzap.train_end_to_end(model, ROOT / "tests/golden/families/qwen3_moe/kvzap-linear", samples, tmp_path)
