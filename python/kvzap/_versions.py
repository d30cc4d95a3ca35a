"""What differs between the versions of transformers that kvzap.Cache runs in (5.2 and later).

Importing this module imports transformers, and with it torch.
"""
from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import cache_utils

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Whether linear attention continues its states in a forward of several tokens (5.21; some models did before).
CONTINUES_STATES = hasattr(cache_utils.Cache, "get_recurrent_state")
CACHE_NAMES = ("cache", "past_key_values")  # of a forward's option for its cache, from 5.24 on and before


def has_attention_functions(architecture: str) -> bool:
    """Whether a class of models calls the function that attn_implementation names, where that can be seen."""
    kind = getattr(transformers, architecture, None)
    if kind is None or getattr(kind, "_supports_attention_backend", True):
        return True
    return hasattr(sys.modules[kind.__module__], "ALL_ATTENTION_FUNCTIONS")


def given_cache(options: Mapping[str, Any]) -> Any:
    """The cache among a forward's options, or None."""
    return next((options[name] for name in CACHE_NAMES if options.get(name) is not None), None)


def give_cache(module: torch.nn.Module, options: dict[str, Any], cache: Any) -> None:
    """Sets the option of a module's forward for its cache."""
    known = inspect.signature(module.forward).parameters
    options[next(name for name in CACHE_NAMES if name in options or name in known)] = cache


def length_after_crop(length: int, *arguments: int, **options: int) -> int:
    """Tokens that a cache of `length` tokens keeps after crop(*arguments, **options) of transformers.

    From 5.15 on the argument is the negative of the number of tokens to remove. Before, 0 or more is the number to keep.
    Raises what transformers raises.
    """
    layer = cache_utils.DynamicLayer()
    layer.keys = layer.values = torch.zeros(1).expand(1, 1, length, 1)
    layer.is_initialized = True
    layer.crop(*arguments, **options)
    return layer.get_seq_length()


class _StatesInLayers:
    """States of linear attention in layers that transformers defines (5.5), of a class derived from its Cache."""

    def _clear_states(self) -> None:
        for layer in self._linear:
            self.layers[layer] = cache_utils.LinearAttentionLayer()

    def _states(self) -> list[torch.Tensor]:
        """The states that are set."""
        found = []
        self._map_states(found.append)
        return found

    def _map_states(self, function: Callable[[torch.Tensor], Any], target: Any = None) -> None:
        """Gives `target` function(state) of each state of linear attention that is set, with all that describes it."""
        for layer in self._linear:
            fields = {name: _map(value, function) for name, value in vars(self.layers[layer]).items()}
            if target is not None:
                vars(target.layers[layer]).update(fields)


def _map(value, function):
    """function(value) of a tensor, a copy of a dict with such values, and any other value itself."""
    if isinstance(value, dict):
        return {key: _map(one, function) for key, one in value.items()}
    return function(value) if hasattr(value, "detach") else value


class _StatesInLists:
    """The same as two lists of the cache, where models of older versions look for them."""

    def _clear_states(self) -> None:
        if self._linear:
            self.conv_states = [None] * len(self.layers)
            self.recurrent_states = [None] * len(self.layers)

    @property
    def has_previous_state(self) -> bool:
        """Whether all layers of linear attention have run."""
        return bool(self._linear) and self.conv_states[self._linear[-1]] is not None

    def _states(self):
        return [state for state in self.conv_states + self.recurrent_states if state is not None] if self._linear else []

    def _map_states(self, function, target=None):
        for name in ("conv_states", "recurrent_states") if self._linear else ():
            states = [state if state is None else function(state) for state in getattr(self, name)]
            if target is not None:
                setattr(target, name, states)


LinearStates = _StatesInLayers if hasattr(cache_utils, "LinearAttentionLayer") else _StatesInLists
