"""The attention of models of transformers whose cache is a kvzap.Cache, and hooks that hand it their hidden states.

Importing this module registers attn_implementation="kvzap".
"""
import threading
import weakref

import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ._errors import Error

ATTENTION = "kvzap"  # of attn_implementation

now = threading.local()  # what a call of transformers leaves for the next one on this thread: update, mask, hidden


def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **options):
    """Attention of transformers (attn_implementation="kvzap"): over a kvzap.Cache if the layer has updated one, and
    that of "sdpa" otherwise.

    query: (batch, query heads, tokens, head_dim); key, value: (batch, KV heads, tokens, head_dim), new tokens alone
    Returns (batch, tokens, query heads, head_dim), and None for the weights.
    """
    cache, layer, updated = getattr(now, "update", None) or (None, None, None)
    now.update = now.mask = None
    if updated is not key:
        if options.get("softcap") or options.get("s_aux") is not None:
            raise Error("attention with a soft cap or sinks over another cache than kvzap.Cache: load the model with "
                        "attn_implementation=\"eager\" for it")
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
                                      **options)
    query, key, value = query.detach(), key.detach(), value.detach()
    if dropout:
        raise Error("attention dropout: expected a model in evaluation mode (model.eval())")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise Error("attention_mask: expected a matrix (sequence, token); kvzap's attention is causal")
    try:
        return cache._attend(layer, module, query, key, value, attention_mask, scaling, options.get("position_ids"),
                             options.get("s_aux")), None
    finally:
        now.hidden = None


def mask(*arguments, attention_mask=None, **options):
    """The mask of attn_implementation="kvzap": padding alone (batch, tokens) for a kvzap.Cache, else that of sdpa."""
    cache, now.mask = getattr(now, "mask", None), None
    if cache is None:
        return sdpa_mask(*arguments, attention_mask=attention_mask, **options)
    return attention_mask


transformers.AttentionInterface.register(ATTENTION, attention)
transformers.AttentionMaskInterface.register(ATTENTION, mask)


def output_map(module):
    """The module of an attention module that maps the heads' output, by the names of transformers' classes; or None."""
    names = ("o_proj", "out_proj", "dense", "c_proj", "Wo")
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def attention_modules(model):
    """The modules of a model that attend, or stand for attention: a layer of a hybrid may have two."""
    return [module for module in model.modules() if hasattr(module, "layer_idx") and output_map(module) is not None]


# Hidden states: attention functions do not get them, so that its module leaves them here.

_watched: weakref.WeakSet = weakref.WeakSet()


def _before_attention(module, arguments, options):
    if any(hasattr(option, "_attend") for option in options.values()):  # the cache's name depends on class and version
        now.hidden = (module, options["hidden_states"] if "hidden_states" in options else arguments[0])


def hidden_of(module):
    """The input of an attention module whose forward runs. Raises Error if no hook has left it."""
    owner, hidden = getattr(now, "hidden", None) or (None, None)
    if owner is not module:
        raise Error("the pruning reads hidden states, which this model does not show: make the cache of model.config itself, "
                    "or use kvzap.press(...)(model)")
    return hidden.detach()


def watch(model):
    """Lets the attention modules of a model show their inputs to caches whose pruning reads them."""
    for module in attention_modules(model):
        if module not in _watched:
            _watched.add(module)
            module.register_forward_pre_hook(_before_attention, with_kwargs=True)


def watch_model_of(config):
    """Calls watch for the model with this config, when it runs next. Returns a function that gives that up."""
    import torch  # transformers has imported it

    def before(module, _):
        if isinstance(module, transformers.PreTrainedModel) and module.config is config:
            handle.remove()
            watch(module)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(before)
    return handle.remove
