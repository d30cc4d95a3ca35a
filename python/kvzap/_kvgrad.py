"""Scores of KVgrad, for models of transformers: which pairs change the final hidden states, by their gradients."""
from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from ._errors import Error

try:
    import torch
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
except ImportError as error:
    raise Error(f"kvzap.kvgrad_scores: {error}; expected torch and transformers: pip install 'kvzap[transformers]'") from error

from ._attention import attention_modules, output_map
from ._versions import give_cache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

WATCHED = "kvzap-watched"  # of attn_implementation
_MESSAGE = "kvzap########"  # stands for a message in a chat template's text
_now = threading.local()  # what attention shows of the forward that runs on this thread


def _watched_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
                       dropout: float = 0.0, scaling: float | None = None, **options: Any) -> tuple[torch.Tensor, None]:
    """Attention of attn_implementation="kvzap-watched": sdpa's, of new tokens to all. It leaves queries and keys."""
    if options.get("softcap") or options.get("s_aux") is not None or options.get("sliding_window"):
        raise Error("kvgrad_scores: expected attention without windows, soft caps and sinks")
    _now.taken[module.layer_idx] = (query.detach()[0], key.detach()[0],
                                    query.shape[-1] ** -0.5 if scaling is None else scaling)
    new, rows = query.shape[2], key.shape[2]
    seen = torch.ones(new, rows, dtype=torch.bool, device=query.device).tril(rows - new)
    return sdpa_attention_forward(module, query, key, value, seen[None, None], scaling=scaling, is_causal=False)


transformers.AttentionInterface.register(WATCHED, _watched_attention)
transformers.AttentionMaskInterface.register(WATCHED, lambda *arguments, **options: None)


def _chat_words(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that a chat template has before a user's message, and those after it."""
    prefix, suffix = "", "\n"
    if tokenizer.chat_template is not None:
        text = tokenizer.apply_chat_template([{"role": "user", "content": _MESSAGE}], add_generation_prompt=True,
                                             tokenize=False, enable_thinking=False)
        parts = text.split(_MESSAGE)
        if len(parts) != 2:
            raise Error(f"kvgrad_scores: expected a chat template that shows a message once, found {len(parts) - 1} times")
        prefix, suffix = parts
    return tuple(tokenizer.encode(words, add_special_tokens=False) for words in (prefix, suffix))


@contextlib.contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Weights without gradients, and watched attention."""
    own = model.config._attn_implementation
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    try:
        model.requires_grad_(False)
        model.set_attn_implementation(WATCHED)
        yield
    finally:
        model.set_attn_implementation(own)
        for weight in trained:
            weight.requires_grad_(True)


class _Replay:
    """The model repeats a part of its context. The gradient is that of the sum of its final hidden states' squares."""

    def __init__(self, model: Any) -> None:
        self.model, self.device = model, next(model.parameters()).device
        self.modules = {module.layer_idx: module for module in attention_modules(model)
                        if isinstance(output_map(module), torch.nn.Linear)}
        layers = model.config.get_text_config().num_hidden_layers
        if sorted(self.modules) != list(range(layers)):
            raise Error(f"kvgrad_scores: expected a model with {layers} attention modules, which map their heads' output by "
                        f"a linear map; found {len(self.modules)}")
        last = self.modules[layers - 1]
        self.last_block = next(block for block in model.modules() if last in block.children())

    def read(self, context: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each layer."""
        cache = transformers.DynamicCache()
        options: dict[str, Any] = {"logits_to_keep": 1}
        give_cache(self.model, options, cache)
        _now.taken = {}
        with torch.no_grad():
            self.model(torch.tensor([list(context)], device=self.device), use_cache=True, **options)
        return [(layer.keys, layer.values) for layer in cache.layers]

    def gradients(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], tokens: Sequence[int]) -> dict[int, torch.Tensor]:
        """(tokens) of each layer: norms of the gradient with respect to the attention module's output."""
        cache = transformers.DynamicCache()
        for layer, (keys, values) in enumerate(pairs):
            cache.update(keys, values, layer)
        outputs, final = {}, []

        def after(module: Any, _: Any, output: Any) -> None:
            output[0].retain_grad()
            outputs[module.layer_idx] = output[0]

        handles = [module.register_forward_hook(after) for module in self.modules.values()]
        handles.append(self.last_block.register_forward_hook(
            lambda _, __, output: final.append(output[0] if isinstance(output, tuple) else output)))
        options: dict[str, Any] = {"logits_to_keep": 1}
        give_cache(self.model, options, cache)
        _now.taken = {}
        try:
            with torch.enable_grad():
                inputs = self.model.get_input_embeddings()(torch.tensor([list(tokens)], device=self.device))
                self.model(inputs_embeds=inputs.detach().requires_grad_(True), use_cache=True, **options)
                final[0].float().square().sum().backward()
        finally:
            for handle in handles:
                handle.remove()
        return {layer: output.grad[0].float().norm(dim=-1) for layer, output in outputs.items()}

    def scores(self, layer: int, values: torch.Tensor, gradient: torch.Tensor, begin: int, end: int, sink: int) -> torch.Tensor:
        """(KV heads, end - begin): the largest product over a group's query heads and the tokens of the repeat."""
        query, key, scaling = _now.taken[layer]
        heads, tokens = key.shape[0], query.shape[1]
        seen = torch.cat([key[:, :min(sink, begin)], key[:, begin:end], key[:, -tokens:]], 1)
        attention = scaling * query.unflatten(0, (heads, -1)) @ seen[:, None].transpose(2, 3)
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=key.device).triu(1)
        attention[..., -tokens:].masked_fill_(later, -torch.inf)
        shares = attention.softmax(-1)[..., min(sink, begin):][..., :end - begin]
        weight = output_map(self.modules[layer]).weight
        maps = weight.view(weight.shape[0], heads, -1, values.shape[-1])
        sizes = torch.einsum("ohgd,htd->hgto", maps, values[0, :, begin:end]).norm(dim=-1)
        return (shares * sizes[:, :, None] * gradient[:, None]).amax((1, 2))


def kvgrad_scores(model: Any, tokenizer: Any, context: Sequence[int], *, chunk_size: int = 512,
                  sink: int = 4) -> NDArray[np.float32]:
    """Scores a context's pairs by KVgrad (openreview cg1wTCJjjk): how much each of them moves the final hidden states.

    The model repeats the context in chunks, as for KVzip. The score of a pair c in a layer is

        max over tokens p of the repeat and query heads of the group:  A(p, c) * |W_O v(c)| * |gradient of P by a(p)|,

    with attention A among sinks, chunk and repeat, and the attention module's output a(p). P is the sum of the squared final
    hidden states of all p. A forward and a backward pass for each chunk: 3 to 4 times the prefill.

    model: a model of transformers in evaluation mode, whose attention has no windows, soft caps or sinks
    tokenizer: its chat template separates the words around a message, which are not repeated
    context: ids (tokens) or (1, tokens), with the chat template's words before the message, whose pairs have score 0
    chunk_size: tokens that the model repeats at a time, at least 1
    sink: first tokens, whose pairs get the largest score + 1
    Returns (layers, KV heads, tokens). Evict by them with a function of your own (`kvzap.add_policy`).
    Raises kvzap.Error for other models, and ValueError for values out of range.
    """
    if model.training:
        raise Error("kvgrad_scores: expected a model in evaluation mode (model.eval())")
    if chunk_size < 1 or sink < 0:
        raise ValueError(f"kvgrad_scores: chunk_size is {chunk_size} and sink {sink}; expected at least 1 and 0")
    given = torch.as_tensor(context)
    if given.dim() not in (1, 2) or given.numel() != given.shape[-1] or (len(given) and given.is_floating_point()):
        raise ValueError(f"kvgrad_scores: the context has shape {tuple(given.shape)} and type {given.dtype}; expected ids of one text")
    context = given.flatten().tolist()
    prefix, suffix = _chat_words(tokenizer)
    if len(context) <= len(prefix):
        raise ValueError(f"kvgrad_scores: there is nothing to repeat: the context has {len(context)} tokens, of which the "
                         f"first {len(prefix)} are the chat template's")
    if context[:len(prefix)] != prefix:
        raise ValueError(f"kvgrad_scores: the context begins with {context[:len(prefix)]}; expected the chat template's words before "
                         f"a message, {prefix}")
    first, later = (tokenizer.encode(f"\n\nRepeat the {words}", add_special_tokens=False) for words in
                    ("previous context exactly.", "part of the previous context exactly, starting with"))
    replay = _Replay(model)
    with torch.inference_mode(False), _frozen(model):
        pairs = replay.read(context)
        result = torch.zeros(len(pairs), pairs[0][0].shape[1], len(context))
        for begin in range(len(prefix), len(context), chunk_size):
            end = min(len(context), begin + chunk_size)
            asked = first if begin == len(prefix) else later + context[max(len(prefix), begin - 8):begin]
            gradients = replay.gradients(pairs, [*asked, *suffix, *context[begin:end]])
            for layer, (_, values) in enumerate(pairs):
                result[layer, :, begin:end] = replay.scores(layer, values, gradients[layer], begin, end, sink)
    result[:, :, :sink] = result.amax() + 1
    return result.numpy()
