"""kvzap.Cache and kvzap.press within transformers, against transformers, kvpress' goldens and kvpress itself."""
import copy
import json
import os
import threading

import numpy as np
import pytest
from conftest import MODEL, ROOT, SURROGATE, THRESHOLD

import kvzap

torch = pytest.importorskip("torch", reason="needs torch and transformers: pip install torch transformers")
transformers = pytest.importorskip("transformers")

GOLDEN = ROOT / "tests/golden"
MODELS = {"recall-4m": MODEL, "llama-random": GOLDEN / "models/llama-random", "qwen2-random": GOLDEN / "models/qwen2-random"}
KVZAP = kvzap.Pruning.kvzap(SURROGATE, threshold=THRESHOLD)


@pytest.fixture(scope="session", autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture(scope="session")
def models():
    loaded = {}

    def load(name):
        if name not in loaded:
            loaded[name] = transformers.AutoModelForCausalLM.from_pretrained(
                MODELS[name], dtype=torch.float32, attn_implementation="kvzap").eval()
        return loaded[name]

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    _ = kvzap.Cache  # registers the attention
    return load


@pytest.fixture
def model(models):
    return models("recall-4m")


def version():
    return tuple(int(number) for number in transformers.__version__.split(".")[:2])


def tensors(file):
    from safetensors.torch import load_file

    return load_file(file)


@pytest.fixture(scope="session")
def texts():
    return [tensors(GOLDEN / f"recall-4m.case{case}.safetensors") for case in range(3)]


@pytest.fixture(scope="session")
def long(texts):
    """A context of about 1,300 tokens."""
    return torch.cat([text["context_ids"] for text in texts])


def ids(tensor):
    return torch.as_tensor(tensor, dtype=torch.long)[None]


def answer(model, cache, context, question, count):
    """Reads context and question as two forwards, as kvpress' pipeline does, and returns the greedy answer."""
    if context is not None:
        model.base_model(ids(context), past_key_values=cache)
    logits = model(ids(question), past_key_values=cache).logits[0, -1]
    stop = model.generation_config.eos_token_id
    stop = stop if isinstance(stop, list) else [stop]
    answered = [int(logits.argmax())]
    while len(answered) < count and answered[-1] not in stop:
        answered.append(int(model(ids([answered[-1]]), past_key_values=cache).logits[0, -1].argmax()))
    return answered


def kept(cache, tokens, sequence=0):
    """(layers, KV heads, tokens): 1 for the rows that a sequence keeps."""
    layers, heads = cache.reports[sequence].kept.shape
    result = np.zeros((layers, heads, tokens), np.uint8)
    for layer in range(layers):
        for head in range(heads):
            result[layer, head, cache.positions(layer, head, sequence)] = 1
    return result


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_kvzap_evicts_and_answers_as_recorded(models, name, kind):
    folder = SURROGATE.parent if name == "recall-4m" else MODELS[name].parent
    compared = 0
    for case in json.loads((GOLDEN / f"{name}.json").read_text()):
        tensor = tensors(GOLDEN / f"{name}.case{case['case']}.safetensors")
        for run in case["runs"]:
            if not run.startswith(f"kvzap-{kind}."):
                continue
            _, threshold, window, moment = run.replace(".tau", " ").replace(".w", " ").rsplit(".", 1)[0].split() + [
                run.rsplit(".", 1)[1]]
            mode = "always" if moment == "decode" else "prefill"
            pruning = (f"kvzap@surrogate={folder}/kvzap-{kind}-{name}@threshold={threshold}@window={window}"
                       f"@prune={mode}")
            cache = kvzap.Cache(models(name).config, pruning)
            context = tensor["context_ids"]
            models(name).base_model(ids(context), past_key_values=cache)
            assert (kept(cache, len(context)) == 1 - tensor[f"{run}.evicted_after_prefill"].numpy()).all(), run
            expected = tensor[f"{run}.generated"].tolist()
            assert answer(models(name), cache, None, tensor["question_ids"], len(expected)) == expected, run
            compared += 1
    assert compared >= 2


def golden_runs(name):
    """The recorded runs of kvpress that a cache can carry out: (run, context, question, tensors). One case and one evict
    ratio of each policy; KVZAP_ALL_GOLDENS=1: all."""
    takes_all = os.environ.get("KVZAP_ALL_GOLDENS")
    for case in json.loads((GOLDEN / f"policies/{name}.json").read_text())[:None if takes_all else 1]:
        text, recorded = tensors(GOLDEN / case["texts"]), tensors(GOLDEN / "policies" / case["file"])
        seen = set()
        for run in case["runs"]:
            kind = (run["policy"], run["amount"].split()[0], run.get("prune"), run.get("decode_every"))
            if is_refused(run) or "kept" not in run or (kind in seen and not takes_all):
                continue
            seen.add(kind)
            yield run, text["context_ids"], text["question_ids"], recorded


# What a cache alone cannot do: the model reads twice, or the question is known with the context.
def is_refused(run):
    return run["policy"].startswith(("kvzip", "finch")) or run.get("prune_after") == "question" or "texts=" in run["policy"]


def pruning_of(run):
    text = run["policy"].replace("{folder}", str(GOLDEN / "policies"))
    kind, _, amount = run["amount"].partition(" ")
    settings = {} if kind == "own" else {kind: amount}
    names = {"prune": "prune", "window": "window", "decode_every": "decode-every", "decode_keep": "decode-keep",
             "decode_evict_ratio": "decode-evict-ratio"}
    settings.update({ours: run[name] for name, ours in names.items() if run.get(name) is not None})
    return text + "".join(f"@{key}={value}" for key, value in settings.items())


@pytest.mark.parametrize("name", MODELS)
def test_policies_evict_and_answer_as_kvpress(models, name):
    """Every recorded run of kvpress, of every policy that a cache can carry out."""
    compared, policies = 0, set()
    for run, context, question, recorded in golden_runs(name):
        cache = kvzap.Cache(models(name).config, pruning_of(run))
        models(name).base_model(ids(context), past_key_values=cache)
        expected = recorded[run["kept"]].numpy()
        assert (cache.report.kept == expected.sum(axis=-1)).all(), run["name"]
        if run.get("tie"):
            continue
        if not run.get("rerotated"):
            assert (kept(cache, len(context)) == expected).all(), run["name"]
        if "generated" in run:
            generated = recorded[run["generated"]].tolist()
            assert answer(models(name), cache, None, question, len(generated)) == generated, run["name"]
        compared += 1
        policies.add(run["policy"].partition(":")[0].partition("+")[0])
    assert compared >= 20 and len(policies) >= 10, policies


def test_the_full_cache_equals_a_dense_one(model, texts):
    context, question = texts[0]["context_ids"], texts[0]["question_ids"]
    dense, cache = transformers.DynamicCache(), kvzap.Cache(model.config)
    for part in (context, question):
        expected = model(ids(part), past_key_values=dense).logits
        found = model(ids(part), past_key_values=cache).logits
        assert torch.allclose(found, expected, atol=2e-4)
    assert cache.get_seq_length() == dense.get_seq_length() == len(context) + len(question)
    for layer in range(model.config.num_hidden_layers):
        for head in range(model.config.num_key_value_heads):
            assert np.abs(cache.keys(layer, head) - dense.layers[layer].keys[0, head].numpy()).max() < 1e-4
            assert np.abs(cache.values(layer, head) - dense.layers[layer].values[0, head].numpy()).max() < 1e-4
    assert cache.report.evict_ratio == 0


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "temperature": 0.8, "top_k": 20}, {"num_beams": 3},
                                     {"num_beams": 4, "num_return_sequences": 2}])
def test_generate_equals_a_dense_cache(model, texts, options):
    prompt = ids(torch.cat([texts[1]["context_ids"], texts[1]["question_ids"]]))
    results = []
    for cache in (transformers.DynamicCache(), kvzap.Cache(model.config)):
        torch.manual_seed(1)
        results.append(model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache,
                                      max_new_tokens=12, pad_token_id=0, **options))
    assert torch.equal(*results)


def test_keys_and_values_of_fewer_bits(model, long):
    def generate(**options):
        cache = kvzap.Cache(model.config, **options)
        found = model.generate(ids(long), past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=0)
        return found[0, len(long):].tolist(), cache.report

    expected, wide = generate()
    for kv_type, share in (("q8", 0.36), ("q4", 0.26)):
        found, report = generate(kv_type=kv_type)
        assert found[:8] == expected[:8], kv_type
        assert report.live_bytes < share * wide.live_bytes
    with pytest.raises(kvzap.Error, match="q8,q4"):
        kvzap.Cache(model.config, kv_type="q5")


def padded(sequences, side):
    longest = max(map(len, sequences))
    rows, masks = [], []
    for sequence in sequences:
        fill = torch.zeros(longest - len(sequence), dtype=torch.long)
        parts = (fill, torch.as_tensor(sequence, dtype=torch.long))
        ones = (torch.zeros_like(fill), torch.ones(len(sequence), dtype=torch.long))
        rows.append(torch.cat(parts if side == "left" else parts[::-1]))
        masks.append(torch.cat(ones if side == "left" else ones[::-1]))
    return torch.stack(rows), torch.stack(masks)


@pytest.mark.parametrize("pruning", [None, KVZAP, "snapkv:window=16+ada@evict-ratio=0.6", "knorm@evict-ratio=0.5"])
def test_sequences_of_a_padded_batch_are_independent(model, long, pruning):
    prompts = [long[:700], long[100:433], long[500:1012]]
    rows, mask = padded(prompts, "left")
    cache = kvzap.Cache(model.config, pruning)
    answers = model.generate(rows, attention_mask=mask, past_key_values=cache, max_new_tokens=6, do_sample=False,
                             pad_token_id=0)[:, rows.shape[1]:]
    for index, prompt in enumerate(prompts):
        alone = kvzap.Cache(model.config, pruning)
        expected = model.generate(ids(prompt), attention_mask=ids(torch.ones(len(prompt))), past_key_values=alone,
                                  max_new_tokens=6, do_sample=False, pad_token_id=0)[0, len(prompt):]
        stop = len(expected)
        assert answers[index, :stop].tolist() == expected.tolist()
        assert cache.reports[index].context_tokens == len(prompt)
        for layer in range(model.config.num_hidden_layers):
            for head in range(model.config.num_key_value_heads):
                rows_alone = alone.positions(layer, head)
                found = cache.positions(layer, head, index)
                assert found[found < len(prompt)].tolist() == rows_alone[rows_alone < len(prompt)].tolist()


def test_padding_on_the_right(model, texts):
    prompts = [texts[0]["context_ids"][:90], texts[1]["context_ids"][:60]]
    rows, mask = padded(prompts, "right")
    cache = kvzap.Cache(model.config)
    logits = model(rows, attention_mask=mask, past_key_values=cache).logits
    for index, prompt in enumerate(prompts):
        expected = model(ids(prompt)).logits[0]
        assert torch.allclose(logits[index, :len(prompt)], expected, atol=2e-4)
        assert cache.reports[index].tokens == len(prompt)


@pytest.mark.parametrize("pruning", [None, KVZAP, "knorm@evict-ratio=0.5"])
def test_crop_returns_to_the_end_of_the_context(model, texts, pruning):
    context, question = texts[0]["context_ids"], texts[0]["question_ids"]
    cache = kvzap.Cache(model.config, pruning)
    first = answer(model, cache, context, question, 8)
    before = kept(cache, cache.get_seq_length())[:, :, :len(context)]
    for _ in range(2):
        cache.crop(len(context) - cache.get_seq_length())
        assert cache.get_seq_length() == len(context)
        assert (kept(cache, len(context)) == before).all()
        assert answer(model, cache, None, question, 8) == first


@pytest.mark.parametrize("tokens", [-7, 0, 5, 20, 1000])
def test_crop_takes_what_dense_caches_take(model, texts, tokens):
    """The number means what it means in the installed version: tokens to keep before 5.15, and to remove since."""
    def outcome(cache):
        model(ids(texts[0]["context_ids"][:20]), past_key_values=cache)
        try:
            cache.crop(tokens)
        except ValueError:
            return ValueError
        return cache.get_seq_length()

    assert outcome(kvzap.Cache(model.config)) == outcome(transformers.DynamicCache())
    if version() in ((5, 2), (5, 24)):
        recorded = {(5, 2): {-7: 13, 0: 0, 5: 5}, (5, 24): {-7: 13, 0: 20, 5: ValueError, 20: ValueError, 1000: ValueError}}
        assert outcome(kvzap.Cache(model.config)) == recorded[version()].get(tokens, 20)


def test_crop_anywhere_without_eviction(model, long):
    context = long[:800]
    cache = kvzap.Cache(model.config)
    model(ids(context[:600]), past_key_values=cache)
    cache.crop(217 - 600)
    found = model(ids(context[217:300]), past_key_values=cache).logits
    assert torch.allclose(found, model(ids(context[:300])).logits[:, 217:], atol=2e-4)
    pruned = kvzap.Cache(model.config, "snapkv@evict-ratio=0.5")
    model(ids(context[:600]), past_key_values=pruned)
    with pytest.raises(kvzap.Error):
        pruned.crop(217 - 600)
    assert pruned.get_seq_length() == 600
    cache.crop(-cache.get_seq_length())
    assert cache.get_seq_length() == 0


def test_assisted_generation_crops_drafts(model, long):
    """Drafts are n-grams of the prompt, or a model's own answers."""
    prompt = ids(torch.cat([long[:300], long[100:300]]))
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False, pad_token_id=0)
    expected = model.generate(prompt, past_key_values=transformers.DynamicCache(), **options)
    for draft in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": model}):
        cache = kvzap.Cache(model.config)
        assert torch.equal(model.generate(prompt, past_key_values=cache, **options, **draft), expected)
        assert cache.get_seq_length() == cache.report.tokens
    pruned = kvzap.Cache(model.config, KVZAP)
    model(prompt[:, :300], past_key_values=pruned)  # generate of 5.24 with drafts would read the prompt again
    drafted = copy.deepcopy(pruned)
    assert not drafted.is_croppable
    model(prompt[:, 300:304], past_key_values=drafted)
    assert drafted.is_croppable
    drafted.crop(-3)
    plain = copy.deepcopy(pruned)
    model(prompt[:, 300:301], past_key_values=plain)
    assert drafted.get_seq_length() == 301 and (drafted.report.kept == plain.report.kept).all()
    found, expected = (model(prompt[:, 301:340], past_key_values=cache).logits for cache in (drafted, plain))
    assert torch.allclose(found, expected, atol=2e-4)
    with pytest.raises((kvzap.Error, ValueError), match="crop"):  # the context and a draft would be pruned together
        model.generate(prompt, past_key_values=kvzap.Cache(model.config, "knorm@evict-ratio=0.5"), prompt_lookup_num_tokens=4,
                       **options)


@pytest.mark.parametrize("pruning", [None, KVZAP])
@pytest.mark.parametrize("size", [1, 64, 333])
def test_chunks_of_a_context_equal_one_reading(model, texts, long, pruning, size):
    context = long[300:700] if size > 1 else long[:1]
    whole, chunked = kvzap.Cache(model.config, pruning), kvzap.Cache(model.config, pruning)
    model(ids(context), past_key_values=whole)
    with chunked.context():
        for chunk in context.split(size):
            model(ids(chunk), past_key_values=chunked)
    assert (kept(whole, len(context)) == kept(chunked, len(context))).all()
    question = texts[2]["question_ids"]
    assert answer(model, chunked, None, question, 8) == answer(model, whole, None, question, 8)


def test_generate_reads_in_chunks(model, long):
    prompt, options = ids(long[:500]), dict(max_new_tokens=6, do_sample=False, pad_token_id=0, prefill_chunk_size=150)
    expected = model.generate(prompt, past_key_values=transformers.DynamicCache(), **options)
    for pruning in (None, KVZAP):
        cache = kvzap.Cache(model.config, pruning)
        with cache.context():
            found = model.generate(prompt, past_key_values=cache, **options)
        assert pruning is not None or torch.equal(found, expected)
        assert cache.report.context_tokens == prompt.shape[1]
        assert (cache.report.evict_ratio > 0.1) == (pruning is not None)


def test_copies_go_separate_ways(model, texts):
    """As transformers' documentation reuses the cache of a prompt."""
    context, question = texts[0]["context_ids"], texts[0]["question_ids"]
    prompt = kvzap.Cache(model.config, KVZAP)
    model(ids(context), past_key_values=prompt)
    copies = [copy.deepcopy(prompt) for _ in range(2)]
    answers = [answer(model, one, None, question, 6) for one in (*copies, prompt)]
    assert answers[0] == answers[1] == answers[2]
    copies[0].crop(len(context) - copies[0].get_seq_length())
    assert answer(model, copies[0], None, question, 6) == answers[0]


def test_threads_have_engines_of_their_own(model, texts):
    context, question = texts[0]["context_ids"], texts[0]["question_ids"]
    expected = answer(model, kvzap.Cache(model.config, KVZAP), context, question, 6)
    answers = []

    def run():
        with torch.no_grad():
            for _ in range(3):
                answers.append(answer(model, kvzap.Cache(model.config, KVZAP), context, question, 6))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == 9 * [expected]


def test_a_conversation_goes_on(model, long):
    pruning = kvzap.Pruning.parse(f"{KVZAP}@prune=always@window=32")
    context = long
    cache = kvzap.Cache(model.config, pruning)
    prompt = ids(context[:500])
    for turn in (500, 530, 560):
        prompt = model.generate(torch.cat([prompt, ids(context[turn:turn + 30])], dim=1), past_key_values=cache,
                                max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert cache.get_seq_length() == prompt.shape[1] - 1
    assert cache.report.tokens == prompt.shape[1] - 1
    assert cache.report.evict_ratio > 0.1


def test_memory_falls_as_the_report_says(model, long):
    full, cache = kvzap.Cache(model.config), kvzap.Cache(model.config, "knorm@evict-ratio=0.75")
    context = ids(long[:1000])
    for one in (full, cache):
        model(context, past_key_values=one)
    assert cache.report.full_bytes == full.report.live_bytes
    assert cache.report.live_bytes == pytest.approx(full.report.live_bytes / 4, rel=0.01)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.reports == []
    model(context, past_key_values=cache)
    assert cache.report.tokens == context.shape[1]


def test_score_policies_run(model, texts):
    def value_norm(layer, head):
        return np.abs(layer.values(head)).sum(axis=1)

    context = texts[0]["context_ids"]
    cache = kvzap.Cache(model.config, kvzap.ScorePolicy(value_norm, evict_ratio=0.5))
    model(ids(context), past_key_values=cache)
    assert (cache.report.kept == len(context) // 2).all()


def test_other_caches_have_the_attention_of_sdpa(models, texts):
    model = models("qwen2-random")
    prompt = ids(texts[0]["context_ids"][:64] % model.config.vocab_size)
    found = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
    model.set_attn_implementation("sdpa")
    try:
        assert torch.equal(found, model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0))
    finally:
        model.set_attn_implementation("kvzap")


def test_half_precision(long):
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16, attn_implementation="kvzap")
    cache = kvzap.Cache(model.config, KVZAP)
    context = long[:1000]
    model(ids(context), past_key_values=cache)
    assert cache.report.full_bytes == 2 * 2 * len(context) * 6 * 4 * 32
    assert 0.3 < cache.report.evict_ratio < 0.95


def test_a_model_that_changes_its_type(texts):
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="kvzap")
    cache = kvzap.Cache(model.config)
    model.to(torch.bfloat16)(ids(texts[0]["context_ids"][:100]), past_key_values=cache)
    assert cache.report.full_bytes == 2 * 2 * 100 * 6 * 4 * 32


def test_press_prunes_what_the_model_would_have_kept(model, texts):
    context = texts[0]["context_ids"]
    with kvzap.press("snapkv", evict_ratio=0.5, window_size=32)(model):
        given = transformers.DynamicCache()
        model(ids(context), past_key_values=given)
        made = model(ids(context)).past_key_values
        generated = model.generate(ids(context), max_new_tokens=3, return_dict_in_generate=True, pad_token_id=0)
    for cache in (given, made, generated.past_key_values):
        assert isinstance(cache, kvzap.Cache)
        assert cache.report.kept.max() == len(context) // 2 + (2 if cache is generated.past_key_values else 0)
    after = model(ids(context)).past_key_values
    assert type(after) is transformers.DynamicCache


@pytest.mark.parametrize("mistake, error", [
    (lambda model: kvzap.Cache(model.config, "snapkv@evict-ratio=1.5"), "evict"),
    (lambda model: kvzap.Cache(model.config, "snpkv@evict-ratio=0.5"), "did you mean snapkv"),
    (lambda model: kvzap.Cache(model.config, "snapkv"), "how much is evicted"),
    (lambda model: kvzap.Cache(model.config, "no-such-policy@evict-ratio=0.5"), "no-such-policy"),
    (lambda model: kvzap.Cache(model.config, "kvzip@evict-ratio=0.5"), "kvzip"),
    (lambda model: kvzap.Cache(model.config, dtype="float64"), "float64"),
    (lambda model: kvzap.Cache(model.config, threads=-1), "threads"),
    (lambda model: kvzap.Cache(model.config, page_rows=0), "page_rows"),
    (lambda model: kvzap.Cache(transformers.BloomConfig()), "Bloom"),
    (lambda model: kvzap.press("snapkv", evict_ratio=0.5, compression_ratio=0.5), "one amount"),
    (lambda model: kvzap.press("KVzipPress", evict_ratio=0.5), "twice"),
])
def test_mistakes_are_named(model, mistake, error):
    with pytest.raises((kvzap.Error, ValueError, TypeError), match=error):
        mistake(model)


def test_a_cache_needs_its_attention(texts):
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with pytest.raises(kvzap.Error, match="set_attn_implementation"):
        model(ids(texts[0]["context_ids"]), past_key_values=kvzap.Cache(model.config))


def test_a_failed_forward_leaves_the_cache_as_it_was(model, texts):
    context = texts[0]["context_ids"]
    cache = kvzap.Cache(model.config, KVZAP)
    model(ids(context), past_key_values=cache)
    before = kept(cache, len(context))

    def fail(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[3].register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(ids(context[:20]), past_key_values=cache)
    hook.remove()
    assert cache.get_seq_length() == len(context)
    question = texts[0]["question_ids"]
    expected = answer(model, kvzap.Cache(model.config, KVZAP), context, question, 6)
    assert answer(model, cache, None, question, 6) == expected
    assert (kept(cache, cache.get_seq_length())[:, :, :len(context)] == before).all()


def test_masks_with_holes_are_refused(model, texts):
    mask = torch.ones(1, 50, dtype=torch.long)
    mask[0, 20] = 0
    with pytest.raises(kvzap.Error, match="padding between"):
        model(ids(texts[0]["context_ids"][:50]), attention_mask=mask, past_key_values=kvzap.Cache(model.config))


def test_masks_may_be_longer_than_the_chunk(model, long):
    prompts = [long[:200], long[300:450]]
    rows, mask = padded(prompts, "left")
    whole, chunked = kvzap.Cache(model.config, KVZAP), kvzap.Cache(model.config, KVZAP)
    model(rows, attention_mask=mask, past_key_values=whole)
    with chunked.context():
        for begin in range(0, 200, 80):
            model(rows[:, begin:begin + 80], attention_mask=mask, past_key_values=chunked)
    for index, prompt in enumerate(prompts):
        assert (kept(whole, len(prompt), index) == kept(chunked, len(prompt), index)).all()
    for wrong in (mask[:, :1], torch.ones(2, 201)):
        with pytest.raises(kvzap.Error, match="attention_mask"):
            model(rows[:, :1], attention_mask=wrong, past_key_values=whole)


def test_renumbered_positions_go_on_in_plain_forwards_alone(model, long):
    cache = kvzap.Cache(model.config, "streaming-llm+rerotate@evict-ratio=0.5")
    model(ids(long[:300]), past_key_values=cache)
    assert cache.get_seq_length() == 150
    model(ids(long[300:310]), past_key_values=cache)
    assert cache.get_seq_length() == 160
    with pytest.raises(kvzap.Error, match="position_ids"):
        model(ids(long[310:311]), position_ids=torch.tensor([[310]]), past_key_values=cache)
    assert cache.get_seq_length() == 160


def test_a_failed_first_forward_fixes_no_batch(model, long):
    cache = kvzap.Cache(model.config, KVZAP)
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[1, 20] = 0
    with pytest.raises(kvzap.Error, match="padding"):
        model(torch.stack([long[:50], long[50:100]]).long(), attention_mask=mask, past_key_values=cache)
    model(ids(long[:50]), past_key_values=cache)
    assert cache.report.tokens == 50


def test_the_inner_press_decides(model, long):
    with kvzap.press("knorm", evict_ratio=0.5)(model), kvzap.press("snapkv", evict_ratio=0.75, window_size=16)(model):
        cache = model(ids(long[:200])).past_key_values
        with pytest.raises(kvzap.Error, match="StaticCache"):
            model(ids(long[:200]), past_key_values=transformers.StaticCache(model.config, max_cache_len=300))
    assert cache.report.pruning.startswith("snapkv") and (cache.report.kept == 50).all()
    given = kvzap.Cache(model.config, dtype="bf16")
    with kvzap.press("knorm", evict_ratio=0.5)(model):
        model(ids(long[:200]), past_key_values=given)
    assert given.report.full_bytes == 200 * 2 * 2 * 6 * 4 * 32 and (given.report.kept == 100).all()


class TestKvpress:
    @pytest.fixture
    def kvpress(self):
        return pytest.importorskip("kvpress", reason="needs kvpress: pip install kvpress")

    @pytest.mark.parametrize("name", MODELS)
    def test_from_press_names_the_recorded_policies(self, models, kvpress, name):
        compared = 0
        names = {**vars(kvpress), "CapPress": kvpress.presses.cap_press.CapPress}
        names.update({kind: kind for kind in ("key_avg", "kv_avg", "kv_product")})
        for run, context, _, recorded in golden_runs(name):
            if run.get("tie") or run.get("rerotated") or any(
                    part in run["kvpress"] for part in (" then ", "PerLayer", "Compactor")):  # no text of one press
                continue
            files = dict(part.split("=") for part in run["policy"].replace("{folder}", str(GOLDEN / "policies"))
                         .partition(":")[2].split(",") if "/" in part)
            pruning = kvzap.from_press(eval(run["kvpress"], names), **files)
            cache = kvzap.Cache(models(name).config, pruning)
            models(name).base_model(ids(context), past_key_values=cache)
            assert (kept(cache, len(context)) == recorded[run["kept"]].numpy()).all(), run["kvpress"]
            compared += 1
        assert compared >= 15

    def test_its_pipeline_runs(self, model, kvpress):
        case = json.loads((GOLDEN / "recall-4m.json").read_text())[0]
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        pipe = transformers.pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)
        questions = [case["question"], "Where is the key?", case["question"]]
        options = {"questions": questions, "max_new_tokens": 24}
        answers = pipe(case["context"], press=kvzap.press(KVZAP), **options)["answers"]
        assert answers[0] == answers[2]
        cache = kvzap.Cache(model.config, KVZAP)
        assert pipe(case["context"], cache=cache, **options)["answers"] == answers
        assert cache.report.evict_ratio > 0.1
        dense = pipe(case["context"], **options)["answers"]
        full = pipe(case["context"], cache=kvzap.Cache(model.config), **options)["answers"]
        assert dense == full

    def test_it_refuses_with_the_reason(self, kvpress):
        for press in (kvpress.KVzipPress(0.5), kvpress.ThinKPress(0.5), kvpress.FinchPress(0.5)):
            with pytest.raises(kvzap.Error, match=type(press).__name__):
                kvzap.from_press(press)
        with pytest.raises(kvzap.Error, match="object"):
            kvzap.from_press(object())

        class Changed(kvpress.KnormPress):
            pass

        with pytest.raises(kvzap.Error, match="Changed"):
            kvzap.from_press(Changed(0.5))

    def test_the_table_of_names_has_every_press(self, kvpress):
        page = (ROOT / "docs/guide/from-kvpress.md").read_text()
        presses = [name for name in dir(kvpress) if name.endswith("Press")]
        assert len(presses) >= 45
        assert [name for name in presses if f"`{name}`" not in page] == []

    def test_texts_of_prunings(self, kvpress):
        kvzap_press = kvpress.KVzapPress(model_type="mlp")
        text = str(kvzap.from_press(kvpress.DMSPress(kvzap_press, threshold=-4, decoding=True), surrogate="a+b@c"))
        assert kvzap.Pruning.parse(text) == kvzap.from_press(
            kvpress.DMSPress(kvzap_press, threshold=-4, decoding=True), surrogate="a+b@c")
        assert "prune=always" in text and "threshold=-4" in text and "+ada" not in text
        assert "+ada:alpha=1" in str(kvzap.from_press(kvpress.KVzapPress(model_type="mlp"), surrogate="a+b"))
        assert "snapkv" in str(kvzap.from_press(kvpress.PrefillDecodingPress(
            kvpress.SnapKVPress(0.5), kvpress.DecodingPress(kvpress.SnapKVPress()))))
