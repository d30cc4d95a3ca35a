"""Surrogates trained end to end: the pruned model's output is to equal the full model's."""
from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import random
import threading
from typing import TYPE_CHECKING, Any

from ._errors import Error

try:
    import torch
    import transformers
    from safetensors.torch import load_file, save
except ImportError as error:
    raise Error(f"kvzap.train_end_to_end: {error}; expected torch and transformers: pip install 'kvzap[transformers]'") from error

from ._attention import attention_modules
from ._samples import Sample
from ._versions import give_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GATED = "kvzap-gated"  # of attn_implementation
_FULL, _WINDOW = ("full_attention", "attention"), "sliding_attention"  # of a config's layer_types
_now = threading.local()  # the gates of the forward that runs on this thread


class _Gates:
    """What the tokens after a context see: the context through gates, and their own question.

    log_gates: (layers, KV heads, context), added to attention scores; None: the full cache
    openings: (layers, KV heads, context) of value 0, whose gradient is the change of the output if one pair more is there; or None
    lengths: tokens of each question with its answer; each continues the context alone
    """

    def __init__(self, context: int, lengths: Sequence[int], log_gates: torch.Tensor | None,
                 openings: torch.Tensor | None, device: torch.device) -> None:
        self.log_gates, self.openings = log_gates, openings
        own = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])
        self.positions = torch.cat([torch.arange(length) + context for length in lengths]).to(device)
        seen = (own[:, None] == own[None]) & (self.positions.cpu()[:, None] >= self.positions.cpu()[None])
        self.seen = torch.cat([torch.ones(len(own), context, dtype=torch.bool), seen], 1).to(device)
        self.distance = self.positions[:, None] - torch.cat([torch.arange(context, device=device), self.positions])[None]


def _gated_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
                     dropout: float = 0.0, scaling: float | None = None, **options: Any) -> tuple[torch.Tensor, None]:
    """Attention of attn_implementation="kvzap-gated", in float32: log gates are added to the context's scores.

    query: (1, query heads, tokens, head_dim); key, value: (1, KV heads, context + tokens, head_dim)
    Returns (1, tokens, query heads, head_dim).
    """
    gates = _now.gates
    heads, tokens, size = query.shape[1:]
    kv_heads = key.shape[1]
    scores = query[0].float().reshape(kv_heads, -1, size) @ key[0].float().transpose(1, 2)
    scores = scores.view(kv_heads, heads // kv_heads, tokens, -1) * (size**-0.5 if scaling is None else scaling)
    if options.get("softcap"):
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    seen, window, ungated = gates.seen, options.get("sliding_window"), scores
    if window:
        seen = seen & (gates.distance < window)
    elif gates.log_gates is not None:
        log_gates = gates.log_gates[module.layer_idx]
        scores = scores + torch.nn.functional.pad(log_gates, (0, tokens))[:, None, None]
    scores = scores.masked_fill(~seen, -torch.inf)
    if options.get("s_aux") is not None:  # sinks: a score of each query head, without a value
        sinks = options["s_aux"].float().view(kv_heads, -1, 1, 1).expand(-1, -1, tokens, 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    value = value[0].float()
    result = weights.reshape(kv_heads, -1, weights.shape[-1]) @ value
    if gates.openings is not None and not window:
        context = gates.openings.shape[-1]
        with torch.no_grad():
            total = scores.logsumexp(-1, keepdim=True)
            there = torch.sigmoid(ungated[..., :context] - total)
        opened = (gates.openings[module.layer_idx][:, None, None] * there).reshape(kv_heads, -1, context)
        result = result + opened @ value[:, :context].detach() - opened.sum(-1, keepdim=True) * result.detach()
    return result.view(heads, tokens, -1).transpose(0, 1)[None].to(query.dtype), None


def _no_mask(*arguments: Any, **options: Any) -> None:
    return None


transformers.AttentionInterface.register(GATED, _gated_attention)
transformers.AttentionMaskInterface.register(GATED, _no_mask)


class _Surrogate(torch.nn.Module):
    """A surrogate folder of kvzap train or kvpress: of each layer Linear, or Linear - GELU - Linear."""

    def __init__(self, folder: pathlib.Path) -> None:
        super().__init__()
        try:
            self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            tensors = load_file(folder / "model.safetensors")
            self.layers, self.hidden = int(self.config["n_modules"]), self.config.get("hidden_dim")
            self.dtype = next(iter(tensors.values())).dtype
            self.parts = [".0.weight", ".0.bias", ".2.weight", ".2.bias"] if self.hidden else [".weight", ".bias"]
            self.weights = torch.nn.ParameterList(
                torch.stack([tensors[f"layers.{layer}{part}"] for layer in range(self.layers)]).float() for part in self.parts)
        except (OSError, KeyError, ValueError, StopIteration) as error:
            raise Error(f"{folder}: expected a surrogate of kvzap train or kvpress (config.json, model.safetensors): {error}") from error
        heads = self.weights[-1].shape[1]
        # Of each head: score = exp(scale) * the weights' score + shift. They are folded into the last weights in a folder.
        self.scale = torch.nn.Parameter(torch.zeros(self.layers, heads))
        self.shift = torch.nn.Parameter(torch.zeros(self.layers, heads))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: (layers, tokens, hidden size). Returns log scores (layers, KV heads, tokens)."""
        x = hidden
        for step in range(0, len(self.weights), 2):
            if step:
                x = torch.nn.functional.gelu(x)
            x = torch.baddbmm(self.weights[step + 1][:, None], x, self.weights[step].transpose(1, 2))
        return (x * self.scale.exp()[:, None] + self.shift[:, None]).transpose(1, 2)

    def folded(self) -> list[torch.Tensor]:
        """The weights with scale and shift in the last ones."""
        weights = [weight.detach().cpu() for weight in self.weights]
        scale, shift = self.scale.detach().cpu().exp(), self.shift.detach().cpu()
        return [*weights[:-2], weights[-2] * scale[..., None], weights[-1] * scale + shift]

    def save(self, folder: pathlib.Path, first: list[torch.Tensor] | None = None, blend: float = 1.0) -> None:
        """Writes config.json and model.safetensors, as kvzap train does. `first` are weights that get 1 - blend of the result."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = self.folded() if first is None else [torch.lerp(one, own, blend) for one, own in zip(first, self.folded())]
        tensors = {f"layers.{layer}{part}": weight[layer].to(self.dtype).contiguous()
                   for part, weight in zip(self.parts, weights) for layer in range(self.layers)}
        (folder / "model.safetensors.new").write_bytes(save(tensors, metadata={"format": "pt"}))
        os.replace(folder / "model.safetensors.new", folder / "model.safetensors")
        _write(folder / "config.json", json.dumps(self.config, indent=2) + "\n")


def _write(path: pathlib.Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


@dataclasses.dataclass
class _Prepared:
    """What a sample's steps need of the frozen model. Its context does not see the gates, so this never changes."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    hidden: torch.Tensor  # (layers, context, hidden size): inputs of attention
    logits: torch.Tensor | None  # (answer tokens, vocabulary) of the full cache

    def bytes(self) -> int:
        parts = [*self.keys, *self.values, self.hidden, self.logits]
        return sum(part.numel() * part.element_size() for part in parts if part is not None)


class _Student:
    """A frozen model that answers a sample's questions with its context's pairs behind gates."""

    def __init__(self, model: Any, memory: int) -> None:
        self.model, self.memory, self.prepared, self.used = model, memory, {}, 0
        self.device = next(model.parameters()).device
        text = model.config.get_text_config()
        has_windows = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
        types = getattr(text, "layer_types", None) or [_WINDOW if has_windows else _FULL[0]] * text.num_hidden_layers
        other = next((kind for kind in types if kind not in (*_FULL, _WINDOW)), None)
        if other or not set(types) & set(_FULL):
            raise Error(f"model: expected layers of full attention, and others of sliding attention alone, found {other or _WINDOW}")
        if model.training:
            raise Error("model: expected a model in evaluation mode (model.eval())")
        self.modules = {module.layer_idx: module for module in attention_modules(model)}
        if sorted(self.modules) != list(range(text.num_hidden_layers)):
            raise Error(f"model: expected {text.num_hidden_layers} attention modules with layer_idx, found {len(self.modules)}")
        self.is_full = torch.tensor([kind in _FULL for kind in types])

    def prepare(self, sample: Sample) -> _Prepared:
        found = self.prepared.get(id(sample))
        if found is None:
            found = self._read(sample)
            if self.used + found.bytes() <= self.memory:
                self.used += found.bytes()
                self.prepared[id(sample)] = found
        return found

    @torch.no_grad()
    def _read(self, sample: Sample) -> _Prepared:
        hidden: dict[int, torch.Tensor] = {}

        def before(module: Any, arguments: Any, options: Any) -> None:
            hidden[module.layer_idx] = (options["hidden_states"] if "hidden_states" in options else arguments[0])[0]

        handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in self.modules.values()]
        cache = transformers.DynamicCache()
        try:
            self._forward(sample.context, cache, logits_to_keep=1)
        finally:
            for handle in handles:
                handle.remove()
        prepared = _Prepared([layer.keys for layer in cache.layers], [layer.values for layer in cache.layers],
                             torch.stack([hidden[layer] for layer in sorted(hidden)]), None)
        prepared.logits = self.logits(sample, prepared, None).to(self.model.dtype)
        return prepared

    def _forward(self, ids: Sequence[int], cache: Any, **options: Any) -> Any:
        give_cache(self.model, options, cache)
        return self.model(torch.tensor([tuple(ids)], device=self.device), use_cache=True, **options)

    def logits(self, sample: Sample, prepared: _Prepared, log_gates: torch.Tensor | None,
               openings: torch.Tensor | None = None) -> torch.Tensor:
        """(answer tokens, vocabulary): logits that predict the answers' tokens, float32."""
        cache = transformers.DynamicCache()
        for layer, (key, value) in enumerate(zip(prepared.keys, prepared.values)):
            cache.update(key, value, layer)
        pairs = [(*question, *answer) for question, answer in sample.questions]
        _now.gates = _Gates(len(sample.context), [len(pair) for pair in pairs], log_gates, openings, self.device)
        own = self.model.config._attn_implementation
        self.model.set_attn_implementation(GATED)
        try:
            result = self._forward(sum(pairs, ()), cache, position_ids=_now.gates.positions[None],
                                   logits_to_keep=sample.predicting().to(self.device))
        finally:
            self.model.set_attn_implementation(own)
            _now.gates = None
        return result.logits[0].float()


def _threshold(scores: torch.Tensor, is_full: torch.Tensor, keep: float, sink: int, window: int) -> torch.Tensor:
    """The threshold that keeps this share of the pairs of layers without windows, sink and window included."""
    judged = scores.detach()[is_full][..., sink:scores.shape[-1] - window].flatten()
    total = int(is_full.sum()) * scores.shape[1] * scores.shape[2]
    stay = min(max(round(keep * total) - (total - judged.numel()), 1), judged.numel())
    return judged.kthvalue(judged.numel() - stay + 1).values


def log_gates(scores: torch.Tensor, threshold: torch.Tensor, sink: int, window: int, temperature: float) -> torch.Tensor:
    """log σ((score − threshold) / temperature), and 0 for the first sink and the last window tokens.

    A temperature of 0 gives the eviction itself: 0 from the threshold on, minus infinity below.
    """
    if temperature > 0:
        gates = torch.nn.functional.logsigmoid((scores - threshold) / temperature)
    else:
        gates = torch.zeros_like(scores).masked_fill(scores < threshold, -torch.inf)
    always = torch.zeros(scores.shape[-1], dtype=torch.bool, device=scores.device)
    always[:sink] = True
    always[scores.shape[-1] - window:] = True
    return gates.masked_fill(always, 0.0)


def _openings(scores: torch.Tensor, threshold: torch.Tensor, temperature: float) -> torch.Tensor:
    """0 for each pair, with the gradient of σ((score − threshold) / temperature): a straight-through estimator (1308.3432)."""
    soft = torch.sigmoid((scores - threshold) / temperature)
    return soft - soft.detach()


def _divergence(sample: Sample, full: torch.Tensor, pruned: torch.Tensor) -> torch.Tensor:
    """Mean over the sample's questions of the mean KL divergence of their answers' tokens, in nats."""
    of_token = torch.nn.functional.kl_div(pruned.log_softmax(-1), full.float().log_softmax(-1), reduction="none",
                                          log_target=True).sum(-1)
    parts = of_token.split([len(answer) for _, answer in sample.questions])
    return torch.stack([part.mean() for part in parts]).mean()


class _Training:
    """A training between two steps: the surrogate, its optimizer, and the log."""

    def __init__(self, model: Any, surrogate: pathlib.Path, settings: dict[str, Any]) -> None:
        self.settings, self.step = settings, 0
        self.log: list[dict[str, Any]] = []
        self.student = _Student(model, settings["memory"])
        self.surrogate = _Surrogate(surrogate).to(self.student.device)
        self.first = [weight.clone() for weight in self.surrogate.folded()]
        layers, kv_heads = self.surrogate.shift.shape
        text = model.config.get_text_config()
        expected = (text.num_hidden_layers, getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        if (layers, kv_heads) != expected:
            raise Error(f"{surrogate}: expected scores of {expected[0]} layers and {expected[1]} KV heads for this model, found {layers} "
                        f"and {kv_heads}")
        weights = list(self.surrogate.weights)
        groups = [{"params": [self.surrogate.scale, self.surrogate.shift], "lr": settings["head_rate"]}]
        if settings["learn"] == "all":
            groups.append({"params": weights, "lr": settings["rate"]})
        for weight in weights:
            weight.requires_grad_(settings["learn"] == "all")
        self.optimizer = torch.optim.Adam(groups)

    def loss(self, sample: Sample, keep: float, temperature: float) -> torch.Tensor:
        prepared = self.student.prepare(sample)
        scores = self.surrogate(prepared.hidden.float())
        sink, window = self.settings["sink"], self.settings["window"]
        if sink + window >= scores.shape[-1]:
            raise Error(f"samples: expected contexts of more than sink + window = {sink + window} tokens, found {scores.shape[-1]}")
        threshold = _threshold(scores, self.student.is_full, keep, sink, window)
        if self.settings["gates"] == "soft" and temperature > 0:
            gates, openings = log_gates(scores, threshold, sink, window, temperature), None
        else:
            gates = log_gates(scores.detach(), threshold, sink, window, 0.0)
            openings = _openings(scores, threshold, temperature) if temperature > 0 else None
        return _divergence(sample, prepared.logits, self.student.logits(sample, prepared, gates, openings))

    def _rates(self) -> None:
        """The learning rates of the next step: ten steps of warming up, then along a cosine to 0."""
        factor = min(1.0, (self.step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * self.step / self.settings["steps"]))
        for group, peak in zip(self.optimizer.param_groups, (self.settings["head_rate"], self.settings["rate"])):
            group["lr"] = peak * factor

    def _chosen(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples of the next step. Each pass over the samples has an order of its own."""
        chosen, batch = [], self.settings["batch"]
        for number in range(self.step * batch, (self.step + 1) * batch):
            order = list(range(len(samples)))
            random.Random(f"{self.settings['seed']} pass {number // len(samples)}").shuffle(order)
            chosen.append(samples[order[number % len(samples)]])
        return chosen

    def train_step(self, samples: Sequence[Sample]) -> float:
        """One step of the optimizer. Draws depend on the seed and the step alone, so that a resumed training repeats them."""
        draw = random.Random(f"{self.settings['seed']} step {self.step}")
        low, high = (math.log(share) for share in self.settings["keep"])
        self._rates()
        self.optimizer.zero_grad()
        total = 0.0
        for sample in self._chosen(samples):
            loss = self.loss(sample, math.exp(draw.uniform(low, high)), self.settings["temperature"]) / self.settings["batch"]
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_([parameter for group in self.optimizer.param_groups for parameter in group["params"]], 1.0)
        self.optimizer.step()
        self.step += 1
        return total

    @torch.no_grad()
    def validate(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Mean divergence of the samples under the eviction itself, for each kept share."""
        return {f"{keep:g}": sum(float(self.loss(sample, keep, 0.0)) for sample in samples) / len(samples)
                for keep in self.settings["validation_keep"]}

    def save(self, folder: pathlib.Path) -> None:
        self.surrogate.save(folder, self.first, self.settings["blend"])
        state = {"settings": self.settings, "step": self.step, "log": self.log, "surrogate": self.surrogate.state_dict(),
                 "optimizer": self.optimizer.state_dict()}
        torch.save(state, folder / "state.pt.new")
        os.replace(folder / "state.pt.new", folder / "state.pt")
        _write(folder / "training.json", json.dumps({"method": "end to end", **self.settings, "log": self.log}, indent=1) + "\n")

    def load(self, path: pathlib.Path) -> None:
        try:
            state = torch.load(path, map_location=self.student.device, weights_only=True)
            began = state["settings"]
            self.surrogate.load_state_dict(state["surrogate"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.log = state["step"], state["log"]
        except Exception as error:  # torch raises many kinds for a damaged file
            raise Error(f"{path}: expected the state of an interrupted training: {error}") from error
        for name, value in self.settings.items():
            if name not in ("memory", "save_every") and began.get(name) != value:
                raise Error(f"{path}: this training began with {name}={began.get(name)}, found {name}={value}; give its settings, or "
                            "another output")


def _digest(samples: Sequence[Sample]) -> str:
    texts = ([[list(sample.context), [[list(part) for part in pair] for pair in sample.questions]] for sample in samples])
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


def _check(settings: dict[str, Any], samples: Sequence[Sample]) -> None:
    low, high = settings["keep"]
    rules = {
        "samples": (len(samples) > 0, "at least one sample", len(samples)),
        "keep": (0 < low <= high < 1, "two shares between 0 and 1, the smaller first", (low, high)),
        "validation_keep": (all(0 < share < 1 for share in settings["validation_keep"]), "shares between 0 and 1",
                            settings["validation_keep"]),
        "gates": (settings["gates"] in ("hard", "soft"), "\"hard\" or \"soft\"", settings["gates"]),
        "learn": (settings["learn"] in ("heads", "all"), "\"heads\" or \"all\"", settings["learn"]),
        "blend": (0 < settings["blend"] <= 1, "above 0 and at most 1", settings["blend"]),
        "temperature": (settings["temperature"] > 0, "a positive number", settings["temperature"]),
        **{name: (settings[name] >= 1, "at least 1", settings[name]) for name in ("steps", "batch", "save_every", "window")},
        **{name: (settings[name] >= 0, "at least 0", settings[name]) for name in ("sink", "head_rate", "rate", "memory")},
    }
    for name, (is_right, expected, found) in rules.items():
        if not is_right:
            raise ValueError(f"train_end_to_end: {name}: expected {expected}, found {found}")


def train_end_to_end(model: Any, surrogate: str | os.PathLike[str], samples: Sequence[Sample], output: str | os.PathLike[str], *,
                     steps: int = 400, batch: int = 4, keep: tuple[float, float] = (0.05, 0.3), window: int = 8, sink: int = 0,
                     gates: str = "hard", temperature: float = 1.0, learn: str = "all", head_rate: float = 0.03, rate: float = 3e-4,
                     blend: float = 1.0, seed: int = 0, validation: Sequence[Sample] = (),
                     validation_keep: Sequence[float] = (0.15, 0.1, 0.05), save_every: int = 25, memory: int = 4 << 30,
                     progress: Callable[[dict[str, Any]], None] | None = None) -> list[dict[str, Any]]:
    """Trains a surrogate so that the model answers from its pruned cache as from the full one.

        samples = kvzap.recall_samples(tokenizer, texts, 200)
        kvzap.train_end_to_end(model, "surrogate", samples, "surrogate-end-to-end")

    model: of transformers, in evaluation mode, on any device. It stays frozen. Layers have full attention; layers of sliding
        attention beside them have no gates
    surrogate: folder to begin with, of kvzap train or kvpress
    samples: contexts with questions and answers, as of `recall_samples`. The engine's dense prefill with `prune="prefill"` is
        repeated: the context's tokens see each other, and the questions' tokens see its pairs through gates
    output: folder; gets config.json and model.safetensors as of kvzap train, training.json and state.pt. The same call continues an
        interrupted training from state.pt, and reaches the same weights as an uninterrupted one
    steps, batch: steps of Adam, and samples of each
    keep: least and greatest share of the pairs that stay; each sample draws one, evenly in its logarithm
    window, sink: most recent and first tokens of a context that always stay
    gates: "hard": the loss is that of the eviction itself. A score's gradient is the change of its head's output if the pair alone
        came back (if a kept pair counted twice), times the slope of σ((score − threshold) / temperature). "soft":
        log σ((score − threshold) / temperature) is added to attention scores
    temperature: of gates, in units of log scores
    learn: "heads": of each KV head a factor and a shift of its scores, which are budgets of heads; "all": all weights, too
    head_rate, rate: peak learning rates of the heads' numbers and of all weights
    blend: share of the learned weights in the output's, whose rest is `surrogate`'s (2109.01903); validation sees the learned ones
    validation, validation_keep: samples on which the log has the divergence under the eviction itself, for these kept shares
    save_every: steps between two saves and validations
    memory: bytes for what the samples' contexts leave; the model reads other contexts again at each use
    progress: gets each entry of the log

    The threshold is the one that keeps the drawn share of the sample's pairs in all heads and layers together. The loss is the KL
    divergence of the answers' tokens from those of the full cache: a mean over tokens of an answer, then over questions.
    Distillation through soft gates is that of DMS (2506.05345) and TRIM-KV (2512.03324), learned budgets of heads that of LKV
    (2605.06676), hard gates are a straight-through estimator (1308.3432).

    Returns the log: of each step `step` and `loss`, in nats; where it was saved, also `validation`.
    Raises kvzap.Error for a model, surrogate or state that does not fit, ValueError for an option out of range.
    """
    samples, validation = list(samples), list(validation)
    settings = {"steps": steps, "batch": batch, "keep": [float(share) for share in keep], "window": window, "sink": sink,
                "gates": gates, "learn": learn, "head_rate": head_rate, "rate": rate, "blend": blend, "temperature": temperature, "seed": seed, "memory": memory,
                "save_every": save_every, "samples": len(samples), "samples_digest": _digest(samples),
                "validation_samples": len(validation), "validation_keep": [float(share) for share in validation_keep]}
    _check(settings, samples)
    folder = pathlib.Path(output).expanduser()
    training = _Training(model, pathlib.Path(surrogate).expanduser(), settings)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        _run(training, samples, validation, folder, progress or (lambda entry: None))
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
    return training.log


def _run(training: _Training, samples: list[Sample], validation: list[Sample], folder: pathlib.Path,
         progress: Callable[[dict[str, Any]], None]) -> None:
    if (folder / "state.pt").exists():
        training.load(folder / "state.pt")
    elif validation:
        training.log.append({"step": 0, "validation": training.validate(validation)})
        progress(training.log[-1])
    while training.step < training.settings["steps"]:
        loss = training.train_step(samples)
        entry: dict[str, Any] = {"step": training.step, "loss": loss}
        is_saved = training.step % training.settings["save_every"] == 0 or training.step == training.settings["steps"]
        if is_saved and validation:
            entry["validation"] = training.validate(validation)
        training.log.append(entry)
        if is_saved:
            training.save(folder)
        progress(entry)
