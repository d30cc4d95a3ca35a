"""kvzap.kvgrad_scores against kvpress' KVgradPress, and a cache that is pruned by them."""
import numpy as np
import pytest
from conftest import ROOT

import kvzap

torch = pytest.importorskip("torch", reason="needs torch and transformers: pip install torch transformers")
transformers = pytest.importorskip("transformers")

GOLDEN = ROOT / "tests/golden"
CHUNK = 48  # of the goldens


def tensors(name):
    from safetensors.torch import load_file

    return load_file(GOLDEN / name)


def loaded(name):
    folder = GOLDEN / "models" / name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder), tensors(f"{name}.case0.safetensors")["context_ids"].tolist()


@pytest.fixture(scope="module", params=["llama-random", "qwen2-random"])
def scored(request):
    model, tokenizer, context = loaded(request.param)
    return request.param, model, context, kvzap.kvgrad_scores(model, tokenizer, context, chunk_size=CHUNK)


def test_scores_are_those_of_kvpress(scored):
    name, model, _, scores = scored
    expected = tensors("kvgrad.safetensors")[name].numpy()
    np.testing.assert_allclose(scores, expected, rtol=1e-3, atol=1e-4 * expected[:, :, 4:].max())
    # The model is as it was.
    assert model.config._attn_implementation != "kvzap-watched"
    assert all(weight.requires_grad and weight.grad is None for weight in model.parameters())


def test_inference_mode_and_tensors(scored):
    name, model, context, scores = scored
    _, tokenizer, _ = loaded(name)
    with torch.inference_mode():
        again = kvzap.kvgrad_scores(model, tokenizer, torch.tensor([context]), chunk_size=CHUNK)
    np.testing.assert_array_equal(again, scores)


def test_a_cache_is_pruned_by_them(scored):
    _, model, context, scores = scored
    kvzap.add_policy(lambda layer, head: scores[layer.layer, head, layer.positions(head)], "kvgrad")
    own = model.config._attn_implementation
    model.set_attn_implementation("kvzap")
    try:
        cache = kvzap.Cache(model.config, "kvgrad+global@evict-ratio=0.6")
        with torch.no_grad():
            model(torch.tensor([context]), past_key_values=cache)
    finally:
        model.set_attn_implementation(own)
    layers, heads, tokens = scores.shape
    kept = np.zeros(scores.shape, dtype=bool)
    for layer in range(layers):
        for head in range(heads):
            kept[layer, head, cache.positions(layer, head)] = True
    assert kept.sum() == pytest.approx(0.4 * scores.size, abs=layers * heads)
    assert scores[kept].min() >= np.sort(scores, axis=None)[-kept.sum() - layers * heads]


def test_bad_input(monkeypatch):
    model, tokenizer, context = loaded("llama-random")
    with pytest.raises(ValueError, match="chunk_size is 0"):
        kvzap.kvgrad_scores(model, tokenizer, context, chunk_size=0)
    with pytest.raises(ValueError, match="nothing to repeat: the context has 0 tokens"):
        kvzap.kvgrad_scores(model, tokenizer, [])
    with pytest.raises(ValueError, match="the context begins with"):
        kvzap.kvgrad_scores(model, tokenizer, [5] * 64)
    with pytest.raises(ValueError, match=r"shape \(2, 8\)"):
        kvzap.kvgrad_scores(model, tokenizer, [[1] * 8] * 2)
    with pytest.raises(kvzap.Error, match="evaluation mode"):
        kvzap.kvgrad_scores(model.train(), tokenizer, context)
    folder = next((GOLDEN / "families").glob("mistral_window*"))
    windowed = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer.chat_template = None
    monkeypatch.setattr(tokenizer, "encode", lambda text, **options: [1, 2] * bool(text))  # the model has 256 tokens
    with pytest.raises(kvzap.Error, match="without windows"):
        kvzap.kvgrad_scores(windowed, tokenizer, [3] * 64)
    assert windowed.config._attn_implementation != "kvzap-watched"
