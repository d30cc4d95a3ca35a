"""kvzap.Cache beside kvpress within transformers: SmolLM2-135M-Instruct on real prompts, both computed anew in float32.

    scripts/real-model --fetch                                        # downloads the model
    python3 -m pytest -s python/tests/test_real_model.py              # one prompt
    KVZAP_ALL_PROMPTS=1 python3 -m pytest -s python/tests/test_real_model.py

Needs the model, torch, transformers, kvpress, and the program kvzap, which the package brings along; skipped without
them. Evicted pairs have no weight at all on both sides (tests/golden/make_policy_goldens.py). Both must keep the same
pairs and answer with the same ids. A pair may differ only if rounding decides it: its score is as near to the limit as
the two models' arithmetic is to each other. A last line for each press tells how many did.
"""
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

import kvzap

torch = pytest.importorskip("torch", reason="needs torch, transformers and kvpress: pip install kvpress")
transformers = pytest.importorskip("transformers")
kvpress = pytest.importorskip("kvpress", reason="needs kvpress: pip install kvpress")
sys.path.insert(0, str(ROOT / "tests/golden"))
import make_policy_goldens as goldens  # noqa: E402

NAME = "smollm2-135m-instruct"
FILE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "kvzap/SmolLM2-135M-Instruct.Q4_1.gguf"
ANSWER = 24  # tokens
ROUNDING = 1e-4  # of the largest score: a pair this near to the limit may be kept by one and evicted by the other
PROMPTS = {  # text, its first tokens, question
    "licence": ("LICENSE", 1000, "What may I do with the work?"),
    "guide": ("docs/guide/troubleshooting.md", 600, "What can I do about an error?"),
    "code": ("python/tests/test_random_calls.py", 300, "What does this code do?"),
}
if not os.environ.get("KVZAP_ALL_PROMPTS"):
    PROMPTS = {"code": PROMPTS["code"]}


def dms(kind, threshold, decoding):
    from kvpress.presses.kvzap_press import KVzapModel

    folder = ROOT / f"inputs/models/kvzap-{kind}-{NAME}"
    scorer = kvpress.KVzapPress(model_type=kind)
    scorer.post_init_from_model = lambda model: None
    scorer.kvzap_model = KVzapModel.from_pretrained(folder)
    press = kvpress.DMSPress(scorer, threshold=threshold, decoding=decoding)
    return press, {"surrogate": folder}


# Presses, made anew for each prompt; the rows at both ends whose scores are constants; what the run needs besides.
PRESSES = {
    "DMSPress(KVzapPress(linear))": (lambda: dms("linear", -5, False), (0, 0), {}),
    "DMSPress(KVzapPress(mlp))": (lambda: dms("mlp", -5, False), (0, 0), {}),
    "DMSPress(KVzapPress(mlp), decoding=True)": (lambda: dms("mlp", -5, True), (0, 0), {}),
    "KnormPress": (lambda: (kvpress.KnormPress(0.5), {}), (0, 0), {}),
    "StreamingLLMPress": (lambda: (kvpress.StreamingLLMPress(0.5), {}), (0, 0), {}),
    "KeyDiffPress": (lambda: (kvpress.KeyDiffPress(0.5), {}), (0, 0), {}),
    "LagKVPress": (lambda: (kvpress.LagKVPress(0.5, lag_size=64), {}), (0, 0), {}),
    "CURPress": (lambda: (kvpress.CURPress(0.5), {}), (4, 0), {}),
    "SnapKVPress": (lambda: (kvpress.SnapKVPress(0.7), {}), (0, 64), {}),
    "PyramidKVPress": (lambda: (kvpress.PyramidKVPress(0.5), {}), (0, 64), {}),
    "TOVAPress": (lambda: (kvpress.TOVAPress(0.5), {}), (0, 1), {}),
    "ObservedAttentionPress": (lambda: (kvpress.ObservedAttentionPress(0.5), {}), (0, 0), {"weights": True}),
    "ExpectedAttentionPress": (lambda: (kvpress.ExpectedAttentionPress(0.5), {}), (4, 0), {}),
    "AdaKVPress(SnapKVPress)": (lambda: (kvpress.AdaKVPress(kvpress.SnapKVPress(0.7, 32)), {}), (0, 32), {}),
}


@pytest.fixture(scope="module", autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not FILE.is_file():
        pytest.skip("needs the model: scripts/real-model --fetch")
    try:
        from kvzap._program import program

        path = program()
    except kvzap.Error as error:
        pytest.skip(str(error))
    made = tmp_path_factory.mktemp("real") / NAME
    subprocess.run([path, "convert", "-m", FILE, "-o", made], check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def model(folder):
    _ = kvzap.Cache  # registers the attention
    transformers.AttentionInterface.register("exact", goldens.exact_attention)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(folder):
    """Ids of context and question, with their parts of the chat template."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prefix, suffix = tokenizer.apply_chat_template([{"role": "user", "content": "\0"}], tokenize=False,
                                                   add_generation_prompt=True).split("\0")

    def ids(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    return {name: (ids(prefix + (ROOT / file).read_text())[:tokens], ids("\n\n" + question + suffix))
            for name, (file, tokens, question) in PROMPTS.items()}


def answer(model, cache, context, question):
    """Greedy ids."""
    model.base_model(torch.tensor([context]), past_key_values=cache)
    stop, step, answered = model.generation_config.eos_token_id, question, []
    while len(answered) < ANSWER and answered[-1:] != [stop]:
        step = [int(model(torch.tensor([step]), past_key_values=cache, logits_to_keep=1).logits[0, -1].argmax())]
        answered += step
    return answered


def kept(cache, tokens):
    """(layer, KV head, token): whether the pair is kept."""
    layers, heads = cache.report.kept.shape
    result = np.zeros((layers, heads, tokens), bool)
    for layer in range(layers):
        for head in range(heads):
            result[layer, head, cache.positions(layer, head)] = True
    return result


def largest_distance(ours, theirs, scores, protected, limit):
    """The largest distance of the scores of pairs that differ to the limit of their head, of the largest score. The
    limit is the lowest score that kvpress keeps, unless one is given."""
    inner = np.abs(scores[..., protected[0]:scores.shape[-1] - protected[1]])
    largest, worst = inner[np.isfinite(inner)].max(), 0.0
    for layer, head in zip(*np.nonzero((ours != theirs).any(axis=-1))):
        differs = (ours != theirs)[layer, head]
        bound = limit
        if bound is None:
            bound = scores[layer, head][theirs[layer, head]].min()
        worst = max(worst, np.abs(scores[layer, head][differs] - bound).max() / largest)
    return worst


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", PRESSES)
def test_pairs_and_ids_are_those_of_kvpress(model, prompts, name, prompt):
    make, protected, more = PRESSES[name]
    context, question = prompts[prompt]
    press, files = make()
    pruning = kvzap.from_press(press, **files)

    model.set_attn_implementation("exact")
    scorer = getattr(press, "press", press)
    expected = goldens.run(model, context, question, ANSWER, {"press": press, "scorer": scorer, "protected": protected, **more})

    model.set_attn_implementation("kvzap")
    cache = kvzap.Cache(model.config, pruning)
    answered = answer(model, cache, context, question)
    at_end = kept(cache, cache.report.tokens)
    cache.crop(len(context) - cache.get_seq_length())
    ours, theirs = kept(cache, len(context)), expected.kept.numpy().astype(bool)

    differing = int((ours != theirs).sum())
    line = f"{name}, {prompt}: {len(context)} tokens, {1 - theirs.mean():.1%} evicted, {differing} of {ours.size} pairs differ"
    if differing:
        limit = press.threshold if isinstance(press, kvpress.DMSPress) else None
        distance = largest_distance(ours, theirs, expected.scores.numpy(), protected, limit)
        line += f", at most {distance:.1e} of the largest score from the limit"
    print(f"\n{line}; {len(answered)} ids{'' if answered == expected.generated.tolist() else ' DIFFER'}")
    assert 0.1 < 1 - theirs.mean() < 0.9
    if differing:
        assert distance < ROUNDING and differing < 1e-3 * ours.size
    else:
        assert (at_end == expected.kept_at_end.numpy()[..., :at_end.shape[-1]]).all()
    assert answered == expected.generated.tolist()
