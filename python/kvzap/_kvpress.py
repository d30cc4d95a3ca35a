"""Presses of kvpress as prunings of kvzap: names, parameters, wrappers."""
from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from . import _flags
from ._errors import Error
from ._kvzap import Pruning, ScorePolicy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

# Each press: the policy's name, and its fields with our names of the parameters.
POLICIES: dict[str, tuple[str, dict[str, str]]] = {
    "KnormPress": ("knorm", {}),
    "RandomPress": ("random", {"seed": "seed"}),
    "StreamingLLMPress": ("streaming-llm", {"n_sink": "sink"}),
    "KeyDiffPress": ("keydiff", {}),
    "LagKVPress": ("lagkv", {"n_sink": "sink", "lag_size": "lag", "cross_scoring": "cross-scoring"}),
    "LeverageScorePress": ("leverage", {"sketch_dimension": "sketch-dimension"}),
    "CURPress": ("cur", {"num_sinks": "sink", "leverage_type": "leverage-type", "use_random_leverage": "random-leverage",
                         "use_local_approximation": "local", "local_window_size": "window"}),
    "CompactorPress": ("compactor", {"sink_size_start": "sink-start", "sink_size_end": "sink-end", "chunk_size": "chunk",
                                     "sketch_dimension": "sketch-dimension", "blending": "blending"}),
    "CapPress": ("cap", {"tau": "tau", "n_future_positions": "future-positions", "n_sink": "sink",
                         "epsilon": "epsilon"}),
    "SnapKVPress": ("snapkv", {"window_size": "window", "kernel_size": "kernel"}),
    "PyramidKVPress": ("pyramidkv", {"window_size": "window", "kernel_size": "kernel", "beta": "beta"}),
    "TOVAPress": ("tova", {}),
    "ObservedAttentionPress": ("h2o", {}),
    "ExpectedAttentionPress": ("expected-attention", {
        "n_future_positions": "future-positions", "n_sink": "sink", "use_covariance": "covariance", "use_vnorm": "vnorm",
        "epsilon": "epsilon"}),
    "NonCausalAttnPress": ("non-causal", {"chunk_size": "chunk"}),
    "SimLayerKVPress": ("simlayerkv", {"lazy_threshold": "lazy-threshold", "n_last": "last", "n_recent": "recent",
                                       "n_initial": "initial"}),
    "QFilterPress": ("qfilter", {}),
    "FastKVzipPress": ("fastkvzip", {"layerwise": "layerwise", "n_sink": "sink", "window_size": "window",
                                     "window_ratio": "window-ratio"}),
    "DuoAttentionPress": ("duo-attention", {"head_compression_ratio": "head-evict-ratio"}),
    "KVzapPress": ("kvzap", {}),
}
# Wrappers: the modifier, and its parameters.
MODIFIERS: dict[str, tuple[str, dict[str, str]]] = {
    "AdaKVPress": ("+ada", {"alpha_safeguard": "alpha"}),
    "CriticalKVPress": ("+critical", {"epsilon": "epsilon", "first_stage_ratio": "first"}),
    "CriticalAdaKVPress": ("+critical", {"epsilon": "epsilon", "first_stage_ratio": "first"}),
    "ChunkPress": ("+chunk", {"chunk_length": "length"}),
    "ChunkKVPress": ("+chunkkv", {"chunk_length": "length"}),
    "EntropyGatedChunkKVPress": ("+chunkkv", {"chunk_length": "length", "low_entropy_chunk_length": "spiky"}),
    "KeyRerotationPress": ("+rerotate", {}),
    "MergingPress": ("+merge", {"similarity_threshold": "similarity", "merge_fraction": "fraction"}),
}
REFUSED = {
    "KVzipPress": "the model reads the context twice: use kvzap.LLM with the policy kvzip or kvzip-plus",
    "RestoreKVPress": "it fills part of the cache with trained rows",
    "KVgradPress": "it needs gradients: evict by kvzap.kvgrad_scores with a function of your own",
    "FinchPress": "it has to know the question: use kvzap.LLM or the program with the policy finch",
    "ThinKPress": "it prunes dimensions of keys, not pairs",
    "ComposedPress": "several presses cut one after another: pass one of them",
    "KVComposePress": "the model reads the context twice: use kvzap.LLM with the policy kvcompose",
    "BlockPress": "pass the press within it; the result is the same",
    "PerLayerCompressionPress": "its ratios come from a file here: +per-layer:ratios=FILE",
}
ALIASES = {"observed-attention": "h2o", "lag-kv": "lagkv", "leverage-score": "leverage", "non-causal-attn": "non-causal",
           "qfilters": "qfilter", "pyramid-kv": "pyramidkv", "snap-kv": "snapkv", "key-diff": "keydiff",
           "q-filter": "qfilter", "sim-layer-kv": "simlayerkv"}


def _value(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value).replace("_", "-") if key == "leverage-type" else _flags.text(value)


def _arguments(given: Mapping[str, object]) -> str:
    """:key=value,... of parameters that are not None."""
    given = {key: value for key, value in given.items() if value is not None}
    escaped = {key: re.sub(r"[,+@]", r"\\\g<0>", _value(key, value)) for key, value in given.items()}
    return ":" + ",".join(f"{key}={value}" for key, value in escaped.items()) if given else ""


def policy_of(name: str) -> str:
    """Name of the policy for a name that kvpress or kvzap uses: "snapkv", "SnapKVPress", "streaming_llm", ..."""
    if name in REFUSED:
        raise Error(f"{name}: {REFUSED[name]}")
    if name in MODIFIERS:
        raise Error(f"{name}: kvpress wraps another press with it; here it stands after a policy, as in "
                    f"\"snapkv{MODIFIERS[name][0]}\"")
    if name in POLICIES:
        return POLICIES[name][0]
    own = re.split("[:+@]", name, maxsplit=1)[0]
    known = own.replace("_", "-").lower()
    return ALIASES.get(known, known) + name[len(own):]


def policy_text(name: str, parameters: Mapping[str, object]) -> str:
    """The policy's text for a name and parameters, of kvpress or kvzap."""
    policy = policy_of(name)
    own = re.split("[:+@]", policy, maxsplit=1)[0]
    names = next((fields for press, fields in POLICIES.values() if press == own), {})
    given = {names.get(key, key.replace("_", "-")): value for key, value in parameters.items()}
    arguments = _arguments(given)
    if arguments and policy[len(own):len(own) + 1] == ":":
        raise ValueError(f"parameters stand in the name {name!r} and in keywords: expected one of them")
    return own + arguments + policy[len(own):]


def _read(press: Any, settings: dict[str, Any], parameters: Mapping[str, object], is_modified: bool = False) -> str:
    """Returns the policy's text of a press, and adds the pruning's settings. A setting of None excludes the press'."""
    kind = type(press).__name__  # a class derived from it may score otherwise
    if kind not in {*POLICIES, *MODIFIERS, *REFUSED, "DMSPress", "DecodingPress", "PrefillDecodingPress",
                    "CompressionRatioDecodingPress", "CAMPress", "ExpectedAttentionStatsPress", "LUKVPress"}:
        raise Error(f"{kind}: kvzap has no policy of this name; write its scores as a function for kvzap.ScorePolicy")
    if kind in REFUSED:
        raise Error(f"{kind}: {REFUSED[kind]}")
    if kind == "ExpectedAttentionStatsPress":
        if "statistics" not in parameters:
            raise Error(f"{kind}: its statistics come from a file; expected from_press(press, statistics=FILE)")
        kind = "ExpectedAttentionPress"
    if kind == "DMSPress":
        settings.update({"threshold": press.threshold, "window": press.sliding_window_size, "evict-ratio": None,
                         "prune": "always" if press.decoding else "prefill"})
        return _read(press.press, settings, parameters)
    if kind in ("DecodingPress", "CompressionRatioDecodingPress", "CAMPress"):
        settings["decode-every"] = press.compression_interval
        if kind == "CompressionRatioDecodingPress":
            settings["decode-evict-ratio"] = press.target_compression_ratio
        else:
            settings["decode-keep"] = press.target_size
        settings.setdefault("evict-ratio", 0)
        modifier = "+cam" + _arguments({"window": press.merge_budget}) if kind == "CAMPress" else ""
        return _read(press.base_press, settings, parameters, bool(modifier)) + modifier
    if kind == "PrefillDecodingPress":
        texts = [_read(part, settings, parameters) for part in (press.prefilling_press, press.decoding_press) if part]
        if len({text.partition("+cam")[0] for text in texts}) > 1:  # cam works in decode alone
            raise Error(f"{kind}: expected one policy for prefill and decode, found {texts[0]} and {texts[1]}")
        return texts[-1]
    if kind == "LUKVPress":
        if "curve" not in parameters:
            raise Error(f"{kind}: its budgets come from a file; expected from_press(press, curve=FILE)")
        settings["evict-ratio"] = press.compression_ratio
        rest = {key: value for key, value in parameters.items() if key != "curve"}
        own = {"curve": parameters["curve"], "sink": press.sink, "window": press.window}
        return _read(press.press, settings, rest, True) + "+per-head" + _arguments(own)
    if kind in MODIFIERS:
        modifier, fields = MODIFIERS[kind]
        given = {own: getattr(press, field, None) for field, own in fields.items()}
        modifier += _arguments(given)
        if kind == "CriticalAdaKVPress":
            modifier += f"+ada:alpha={press.alpha_safeguard}"
        return _read(press.press, settings, parameters, True) + modifier
    policy, fields = POLICIES[kind]
    given = {own: getattr(press, field) for field, own in fields.items()}
    given.update({key.replace("_", "-"): value for key, value in parameters.items()})
    sets_own = policy in ("simlayerkv", "duo-attention")
    if "evict-ratio" not in settings and not sets_own and hasattr(press, "compression_ratio"):
        settings["evict-ratio"] = press.compression_ratio
    text = policy + _arguments(given)
    if policy == "kvzap" and not is_modified and settings.get("threshold") is None:
        text += "+ada:alpha=1"  # a budget of each head, where kvzap alone would look a threshold up
    return text


def from_press(press: Any, **parameters: object) -> Pruning:
    """The `Pruning` that evicts what a press of kvpress evicts.

        kvzap.from_press(kvpress.AdaKVPress(kvpress.SnapKVPress(compression_ratio=0.5)))
        kvzap.from_press(kvpress.DMSPress(kvpress.KVzapPress(model_type="mlp"), threshold=-4), surrogate="KVzap-mlp-Qwen3-8B")

    press: any press that scores pairs, with wrappers; docs/guide/from-kvpress.md has a table
    parameters: what kvpress downloads and kvzap reads from files: surrogate (KVzapPress), filters (QFilterPress), gates
        (FastKVzipPress), pattern (DuoAttentionPress), statistics (ExpectedAttentionStatsPress), curve (LUKVPress)

    Raises kvzap.Error, with the reason, for presses that are no eviction of pairs or need more than one reading.
    """
    settings: dict[str, Any] = {}
    text = _read(press, settings, parameters)
    given = {key: value for key, value in settings.items() if value is not None}
    return Pruning.parse(text + "".join(f"@{key}={value}" for key, value in given.items()))


@dataclasses.dataclass(frozen=True, repr=False)
class Press:
    """A pruning as a press of kvpress: `with press(model):` prunes the caches of the model's forwards.

    Within the block, forwards that begin an empty cache get a kvzap.Cache with this pruning: in place of none, and of
    a DynamicCache, which becomes one. The model keeps attn_implementation="kvzap" afterwards, which equals "sdpa" for
    other caches. kvpress' pipeline takes a Press as its `press`.
    """

    pruning: Pruning | ScorePolicy
    _engines: list[Any] = dataclasses.field(default_factory=list, init=False, compare=False)  # of its caches, to be used again

    def __call__(self, model: Any) -> AbstractContextManager[Any]:
        from ._transformers import pruned  # imports transformers

        return pruned(model, self.pruning, self._engines)

    def __repr__(self) -> str:
        return f"<kvzap.Press {self.pruning}>"

    def __reduce__(self) -> tuple[type[Press], tuple[Pruning | ScorePolicy]]:
        return Press, (self.pruning,)


def is_press(value: object) -> bool:
    """Whether a value is a press of kvpress. Arrays have a method compress, too."""
    kinds = type(value).__mro__
    return hasattr(value, "forward_hook") and any(kind.__name__.endswith("Press") for kind in kinds)


def unpressed(policy: object) -> object:
    """The pruning of a press, of this package or of kvpress; other objects as they are."""
    if isinstance(policy, Press):
        return policy.pruning
    return from_press(policy) if is_press(policy) else policy


def press(name: str | Pruning | ScorePolicy | Any, *, evict_ratio: float | None = None,
          compression_ratio: float | None = None, keep_tokens: int | None = None,
          threshold: float | str | None = None, **parameters: object) -> Press:
    """A `Press` of a policy, with the names and parameters of kvpress or of kvzap.

        with kvzap.press("snapkv", evict_ratio=0.5, window_size=32)(model):
            model.generate(**inputs)

    name: of a policy, such as "snapkv", "SnapKVPress" or "snapkv+ada"; or a `Pruning`, a `ScorePolicy`, or a press of
        kvpress, alone
    evict_ratio, compression_ratio: share of the pairs to evict, two names for one amount
    keep_tokens, threshold: other amounts, as of Pruning.policy
    parameters: those of the policy

    Raises kvzap.Error for an unknown policy or parameter, with the nearest known name, and for a missing file;
    kvzap.PruningError for a missing amount, two amounts, or a value out of range; TypeError for two names of one
    amount.
    """
    if not isinstance(name, str):
        if parameters or {evict_ratio, compression_ratio, keep_tokens, threshold} != {None}:
            raise TypeError("press: a pruning or a press has its own amount and parameters")
        pruning = unpressed(name)
        if not isinstance(pruning, (Pruning, ScorePolicy)):
            raise TypeError(f"press: expected a policy's name, a Pruning, a ScorePolicy or a press of kvpress, found "
                            f"{type(name).__name__}")
        if isinstance(pruning, Pruning):
            pruning._check()
        return Press(pruning)
    if evict_ratio is not None and compression_ratio is not None:
        raise TypeError("press: evict_ratio and compression_ratio are one amount")
    ratio = evict_ratio if evict_ratio is not None else compression_ratio
    pruning = Pruning.policy(policy_text(name, parameters), evict_ratio=ratio, keep_tokens=keep_tokens,
                             threshold=threshold)
    pruning._check()
    return Press(pruning)
