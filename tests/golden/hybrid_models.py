"""Models in which some layers have linear attention instead of attention: their caches and presses.

transformers' own cache of such a model drops rows that leave a window. kvpress reads and replaces the rows of
`cache.layers`, and expects attention in every layer of a model.
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer


def attention_layers(model):
    """The attention of each layer that has one, by the layer's index."""
    blocks = enumerate(model.model.layers)
    kinds = getattr(model.config, "layer_types", None) or []
    linear = {layer for layer, kind in enumerate(kinds) if kind == "linear_attention"}  # also called self_attn
    return {
        layer: block.self_attn
        for layer, block in blocks
        if getattr(block, "self_attn", None) is not None and layer not in linear
    }


def accept_newer_names(model):
    """Lets hooks of attention, as those of kvpress, find arguments that transformers 5.24 names otherwise."""

    def rename(module, args, kwargs, output):
        if "past_key_values" not in kwargs:
            kwargs["past_key_values"] = kwargs["cache"]
        if "cache_position" not in kwargs:
            rows = kwargs["past_key_values"].layers[module.layer_idx].keys.shape[2]
            of_rows = torch.arange(rows - kwargs["hidden_states"].shape[1], rows).unsqueeze(0)
            kwargs["cache_position"] = kwargs.get("position_ids", of_rows)[0]

    for attention in attention_layers(model).values():
        attention.register_forward_hook(rename, with_kwargs=True)


class HybridCache(DynamicCache):
    """Rows of the layers with attention, and the states of layers that keep one.

    The model must run its prompt in one pass, then one token a pass. Layers of the cache follow the
    model's, so kvpress finds those with rows by their index.
    """

    def __init__(self, config):
        super().__init__(config=config)
        windows = DynamicSlidingWindowLayer  # drop rows that leave the window
        self.layers = [DynamicLayer() if isinstance(layer, windows) else layer for layer in self.layers]


@contextlib.contextmanager
def attached(press, model):
    """press(model), which sees only the layers with attention. Without a press, nothing."""
    if press is None:
        yield
        return
    blocks = [model.model.layers[layer] for layer in attention_layers(model)]
    # kvpress prefers the layers of a language_model where there is one.
    seen = SimpleNamespace(layers=blocks, rotary_emb=getattr(model.model, "rotary_emb", None))
    with contextlib.ExitStack() as stack:
        with mock.patch.object(model.model, "language_model", seen, create=True):
            stack.enter_context(press(model))
        yield


def split_convolutions(model, path):
    """Stores an OLMo Hybrid as published checkpoints: convolutions of queries, keys and values apart.

    save_pretrained would split them into three equal parts, and name the norms of all layers alike.
    """
    tensors = {}
    for name, tensor in model.state_dict().items():
        block = name.split(".")[2] if ".layers." in name else ""
        is_linear = block and model.config.layer_types[int(block)] == "linear_attention"
        if name.endswith("linear_attn.conv1d.weight"):
            net = model.model.layers[int(block)].linear_attn
            parts = tensor.split([net.key_dim, net.key_dim, net.value_dim])
            for kind, part in zip("qkv", parts):
                tensors[name.replace("conv1d", f"{kind}_conv1d")] = part.clone()
            continue
        if is_linear:
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def rename_dense_parts(model, path):
    """Stores the dense parts of a Kimi Linear as published checkpoints.

    save_pretrained gives them the name of blocks of experts.
    """
    tensors = {}
    for name, tensor in load_file(path).items():
        block = name.split(".")[2] if ".layers." in name else ""
        if block and model.config.mlp_layer_types[int(block)] == "dense":
            name = name.replace(".block_sparse_moe.", ".mlp.")
        tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})


def drop_tensors(path, endings):
    """Drops the tensors whose names end so."""
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.endswith(endings)}
    save_file(tensors, path, metadata={"format": "pt"})


def fuse_experts(model, path):
    """Stores the experts of each layer in two tensors with the model's values, as published checkpoints do.

    save_pretrained writes the tensors of each expert instead.
    """
    tensors = {name: tensor for name, tensor in load_file(path).items() if ".experts." not in name}
    for name, tensor in model.state_dict().items():
        if ".experts." in name:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
