"""Models in which some layers have linear attention instead of attention: their caches and presses.

transformers keeps the states of such a model in a cache of its own, which has no `layers`. kvpress
reads and replaces the rows of `cache.layers`, and expects attention in every layer of a model.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

from safetensors.torch import load_file, save_file
from transformers import DynamicCache


def attention_layers(model):
    """The attention of each layer that has one, by the layer's index."""
    blocks = enumerate(model.model.layers)
    return {layer: block.self_attn for layer, block in blocks if hasattr(block, "self_attn")}


class HybridCache(DynamicCache):
    """Rows of the layers with attention, and the states of linear attention.

    The model must run its prompt in one pass, then one token a pass. transformers' linear attention
    forgets its states in a later pass with more tokens.
    """

    def __init__(self, config):
        super().__init__()
        self.conv_states = [None] * config.num_hidden_layers
        self.recurrent_states = [None] * config.num_hidden_layers
        self.last_linear = max(l for l, kind in enumerate(config.layer_types) if kind == "linear_attention")

    @property
    def has_previous_state(self):
        return self.conv_states[self.last_linear] is not None


@contextlib.contextmanager
def attached(press, model):
    """press(model), which sees only the layers with attention. Without a press, nothing."""
    if press is None:
        yield
        return
    blocks = [model.model.layers[layer] for layer in attention_layers(model)]
    # kvpress prefers the layers of a language_model where there is one.
    seen = SimpleNamespace(layers=blocks, rotary_emb=model.model.rotary_emb)
    with contextlib.ExitStack() as stack:
        with mock.patch.object(model.model, "language_model", seen, create=True):
            stack.enter_context(press(model))
        yield


def fuse_experts(model, path):
    """Stores the experts of each layer in two tensors with the model's values, as published checkpoints do.

    save_pretrained writes the tensors of each expert instead.
    """
    tensors = {name: tensor for name, tensor in load_file(path).items() if ".experts." not in name}
    for name, tensor in model.state_dict().items():
        if ".experts." in name:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
