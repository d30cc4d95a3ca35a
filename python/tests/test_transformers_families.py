"""kvzap.Cache in every family of models, against the recorded runs of transformers and kvpress."""
import copy
import json

import pytest
from test_transformers import GOLDEN, padded, tensors, without_gradients  # noqa: F401

import kvzap

torch = pytest.importorskip("torch", reason="needs torch and transformers: pip install torch transformers")
transformers = pytest.importorskip("transformers")


def family_config(name):
    """The config of a family's random model. Skips a family that the installed transformers lacks."""
    config = json.loads((GOLDEN / "families" / name / "config.json").read_text())
    if not hasattr(transformers, config["architectures"][0]):
        pytest.skip(f"transformers {transformers.__version__} has no {config['architectures'][0]}")
    try:
        return transformers.AutoConfig.from_pretrained(GOLDEN / "families" / name)
    except Exception as error:
        if "layer_types" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} has older names of layers: {error}")


def family(name):
    """The random model of a family, and its recorded runs: golden.json and tensors."""
    _ = kvzap.Cache  # registers the attention
    config = family_config(name)
    folder = GOLDEN / "families" / name
    kind = getattr(transformers, config.architectures[0])
    model = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="kvzap",
        experts_implementation="eager")  # other implementations of experts want widths of whole 16 bytes
    return model, json.loads((folder / "golden.json").read_text()), tensors(folder / "golden.safetensors")


def kvzap_of(name, golden):
    surrogate = GOLDEN / "families" / name / "kvzap-linear"
    return f"kvzap@surrogate={surrogate}@threshold={golden['threshold']}@window={golden['window']}"


FAMILIES = sorted(file.parent.name for file in (GOLDEN / "families").glob("*/golden.json"))
REFUSED = {
    "latent attention": ["axk1", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
                         "kimi_linear", "longcat_flash", "minicpm3", "mistral4", "sarvam_mla", "youtu"],
    "lightning attention": ["minimax"],
    "values of another size": ["mimo_v2_flash", "mimo_v2_full"],
    "other than attention and gated delta nets": [
        "bamba", "falcon_h1", "falcon_h1_gates", "granitemoehybrid", "granitemoehybrid_dense", "jamba", "jamba_dense", "lfm2",
        "lfm2_moe", "lfm3", "lfm3_plain", "nemotron_h", "nemotron_h_states", "zamba", "zamba2", "zamba2_one_block"],
    "of another layer": ["gemma3n", "gemma4"],
    "has its own attention": ["falcon", "falcon_multi_query", "gpt_neo", "gpt_neox_japanese", "xglm"],
}
REASONS = {name: reason for reason, names in REFUSED.items() for name in names}


@pytest.mark.parametrize("name", REASONS)
def test_other_families_are_refused(name):
    with pytest.raises(kvzap.Error, match=f"{REASONS[name]}.*kvzap.LLM"):
        kvzap.Cache(family_config(name))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REASONS])
def test_families_run_as_recorded(name):
    """The full cache, KVzap and policies of recorded runs: answers, and rows that layers without windows keep."""
    config = family_config(name)
    if name == "olmo_hybrid" and OLDER:
        return
    kind = getattr(transformers, config.architectures[0])
    if name in ("gptj", "nemotron") and not kind._supports_attention_backend:  # as in transformers 5.2
        with pytest.raises(kvzap.Error, match="has its own attention"):
            kvzap.Cache(config)
        return
    model, golden, recorded = family(name)
    model.generation_config.eos_token_id = None
    prompt, count = torch.tensor([golden["prompt"]]), golden["new_tokens"]
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    windows = golden.get("windows", [0] * len(kinds))
    full = [layer for layer, kind in enumerate(kinds) if kind != "linear_attention" and windows[layer] == 0]

    def generate(pruning=None):
        cache = kvzap.Cache(model.config, pruning)
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=count,
                               do_sample=False, pad_token_id=0)
        return cache, found[0, prompt.shape[1]:].tolist()

    cache, found = generate()
    assert found == recorded["full.generated"].tolist()
    assert cache.is_croppable == (len(full) == len(kinds))
    if cache.is_croppable and name != "phi3":  # after the switch of longrope's factors, transformers leaves any cache unused
        tokens = cache.get_seq_length()
        cache.crop(-3)
        assert cache.get_seq_length() == tokens - 3
    if not full:
        with pytest.raises(kvzap.Error, match="nothing can be pruned"):
            generate("knorm@evict-ratio=0.5")
        return
    if name == "phi3":
        return
    runs = {run: (kvzap_of(name, golden), 1 - recorded[f"{run}.evicted_after_prefill"].numpy())
            for run in golden["runs"] if run.endswith("prefill")}
    runs.update({run["policy"]: (f"{run['policy']}@evict-ratio={run['evict_ratio']}",
                                 recorded[f"{run['policy']}.kept"].numpy()) for run in golden["policies"]})
    for run, (pruning, expected) in runs.items():
        cache, found = generate(pruning)
        assert found == recorded[f"{run}.generated"].tolist(), run
        for layer in full:
            for head in range(expected.shape[1]):
                rows = cache.positions(layer, head)
                assert rows[rows < prompt.shape[1]].tolist() == expected[layer, head].nonzero()[0].tolist(), (run, layer, head)


OLDER = not hasattr(transformers.cache_utils.Cache, "get_recurrent_state")


@pytest.mark.skipif(not OLDER, reason="needs transformers before 5.21")
def test_states_of_other_kinds_are_refused():
    with pytest.raises(kvzap.Error, match="5.21"):
        kvzap.Cache(family_config("olmo_hybrid"))


HYBRIDS = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", *([] if OLDER else ["olmo_hybrid"])]


def step(model, cache, rows, mask=None):
    return model(rows, attention_mask=mask, past_key_values=cache, use_cache=True).logits[:, -1]


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_of_hybrids_follow_the_batch(name):
    model, golden, _ = family(name)
    prompt = torch.tensor(golden["prompt"])
    other = prompt.flip(0)
    rows, mask = padded([prompt, other[:60]], "left")
    alone = []
    for row in (prompt, other[:60]):
        cache = kvzap.Cache(model.config)
        alone.append([step(model, cache, row[None]), step(model, cache, torch.tensor([[7]]))])
    cache = kvzap.Cache(model.config)
    close(step(model, cache, rows, mask), torch.cat([first for first, _ in alone]))
    second = copy.deepcopy(cache)
    mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
    expected = torch.cat([last for _, last in alone])
    close(step(model, cache, torch.tensor([[7], [7]]), mask), expected)
    second.reorder_cache(torch.tensor([1, 1]))
    close(step(model, second, torch.tensor([[7], [7]]), mask[[1, 1]]), expected[[1, 1]])
    with pytest.raises(kvzap.Error, match="states of linear attention"):
        second.crop(-1)
    second.reset()
    close(step(model, second, prompt[None]), alone[0][0])
    second.reset()
    right, mask = padded([prompt, other[:60]], "right")
    with pytest.raises(kvzap.Error, match="expected it on the left"):
        step(model, second, right, mask)
    with pytest.raises(kvzap.Error, match="call reset"):
        step(model, second, prompt[:1][None])
    with pytest.raises(kvzap.Error, match="call reset"):
        step(model, copy.deepcopy(second), prompt[:1][None])
    close(*[step(model, cache, prompt[:1][None]) for cache in (kvzap.Cache(model.config), None)])


@pytest.mark.parametrize("is_pruned", [False, True])
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_read_several_times(name, is_pruned):
    model, golden, _ = family(name)
    prompt = torch.tensor([golden["prompt"]])
    pruning = kvzap_of(name, golden) if is_pruned else None
    cache, chunked, whole = (kvzap.Cache(model.config, pruning) for _ in range(3))
    step(model, cache, prompt[:, :90])
    if OLDER:
        states = [state.clone() for state in cache._states()]
        with pytest.raises(kvzap.Error, match="expected one token"):
            step(model, cache, prompt[:, 90:])
        assert all(torch.equal(*pair) for pair in zip(states, cache._states()))
        return
    expected = step(model, whole, prompt)
    with chunked.context():
        for chunk in prompt.split(35, dim=1):
            found = step(model, chunked, chunk)
    close(found, expected)
    assert (chunked.report.kept == whole.report.kept).all() and chunked.report.context_tokens == prompt.shape[1]
    close(*[step(model, one, prompt[:, :7]) for one in (whole, chunked)])
    if not is_pruned:
        close(step(model, cache, prompt[:, 90:]), expected)


@pytest.mark.parametrize("name", HYBRIDS)
def test_press_prunes_hybrids(name):
    model, golden, recorded = family(name)
    prompt = torch.tensor([golden["prompt"]])
    with kvzap.press("knorm", evict_ratio=0.5)(model):
        cache = model(prompt).past_key_values
    assert (cache.report.kept.sum(axis=1)[cache._attending] == recorded["knorm.kept"].numpy().sum(axis=(1, 2))[cache._attending]).all()


@pytest.mark.skipif(OLDER, reason="transformers discards states")
def test_padding_between_tokens_of_hybrids_is_refused():
    model, golden, _ = family("qwen3_next")
    prompt = torch.tensor([golden["prompt"], golden["prompt"][::-1]])
    mask = torch.ones_like(prompt)
    mask[1, :50] = 0
    expected = step(model, kvzap.Cache(model.config), prompt, mask)
    cache, second = kvzap.Cache(model.config), kvzap.Cache(model.config)
    step(model, cache, prompt[:, :40], mask[:, :40])  # no token of the second sequence yet
    close(step(model, cache, prompt[:, 40:], mask), expected)
    with pytest.raises(kvzap.Error, match="expected 40"):
        step(model, second, prompt[:, :40], mask)
    for width in (1, 3):
        copied = copy.deepcopy(cache)
        late = torch.cat([mask, torch.tensor([[1] * width, [0] + [1] * (width - 1)])], dim=1)
        with pytest.raises(kvzap.Error, match="expected it on the left"):
            step(model, copied, prompt[:, :width], late)
