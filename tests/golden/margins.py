"""How clearly models and policies choose: rounding must decide nothing in a golden."""

import torch
from transformers.models.afmoe.modeling_afmoe import AfmoeTokenChoiceRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.hy_v3.modeling_hy_v3 import HYV3TopKRouter
from transformers.models.laguna.modeling_laguna import LagunaTopKRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.kolibri1.modeling_kolibri1 import Kolibri1TopKRouter
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashTopkRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.step3p7.modeling_step3p7 import Step3p7TopKRouter

# By how much choices must be clear: of the largest logit of a step, of the largest score of a
# router, of the largest score of the surrogate, of the largest score of a policy in a head.
MARGINS = {"logits": 2e-4, "experts": 5e-5, "threshold": 1e-4, "cut": 1e-5}


class TooClose(Exception):
    """A choice that rounding may decide, or an answer that repeats itself."""


class Margins:
    """The closest choice of each kind."""

    def __init__(self, enforced):
        self.closest = {}
        self.enforced = enforced

    def add(self, kind, distance):
        self.closest[kind] = min(float(distance), self.closest.get(kind, float("inf")))
        if self.enforced and distance < MARGINS[kind]:
            raise TooClose(f"{kind}: {float(distance):.1e}")

    def cut(self, kind, scores, k, of_itself=False):
        """Between the k-th and the next of the last dimension, of its largest or of the k-th."""
        ordered = scores.sort(dim=-1, descending=True).values
        size = ordered[..., k - 1] if of_itself else ordered.abs().amax(dim=-1)
        self.add(kind, ((ordered[..., k - 1] - ordered[..., k]) / size).min())

    def threshold(self, scores, threshold):
        self.add("threshold", ((scores - threshold).abs() / scores.abs().max()).min())


def watch_routers(model, margins):
    """Adds how clearly each router chooses."""

    def mixer_margins(logits, limit):
        """How clearly SparseMixer orders two experts, and leaves out those far from each."""
        margins.cut("experts", logits, 1)
        for largest in logits.sort(dim=-1, descending=True).values[:, :2].unbind(dim=-1):
            largest = largest.unsqueeze(-1)
            distances = (largest - logits) / torch.maximum(logits.abs(), largest)
            margins.add("experts", (distances - limit).abs().min())

    def hook(module, args, output):
        # The scores that it chooses by, or their logits.
        scores = output[0] if isinstance(output, tuple) else output
        if hasattr(module, "topk_group"):
            if hasattr(module, "e_score_correction_bias"):
                scores = scores.sigmoid() + module.e_score_correction_bias
            else:
                scores = scores.softmax(dim=-1)
            groups = scores.view(-1, module.num_group or 1, module.num_experts // (module.num_group or 1))
            of_best = getattr(module, "topk_method", None) == "group_limited_greedy"
            sums = groups.topk(1 if of_best else 2, dim=-1).values.sum(dim=-1)
            topk_group = module.topk_group or 1
            if topk_group < groups.shape[1]:
                margins.cut("experts", sums, topk_group)
            chosen = sums.topk(topk_group, dim=-1).indices.unsqueeze(-1)
            scores = groups.gather(1, chosen.expand(-1, -1, groups.shape[-1])).flatten(1)
        elif isinstance(module, (MiniMaxM2TopKRouter, AfmoeTokenChoiceRouter, HYV3TopKRouter, Lfm2MoeTopKRouter)):
            scores = scores.sigmoid() + args[1]
        elif isinstance(module, Ernie4_5_MoeTopKRouter):
            scores = module.moe_statics(scores.softmax(dim=-1))
        elif isinstance(module, Llama4Router):
            scores = output[1]
        elif isinstance(module, (LagunaTopKRouter, Step3p7TopKRouter)):
            scores = scores.sigmoid() + module.e_score_correction_bias
        elif isinstance(module, Kolibri1TopKRouter):
            scores = scores + module.e_score_correction_bias
        elif isinstance(module, LongcatFlashTopkRouter):
            scores = scores.softmax(dim=-1) + module.e_score_correction_bias
        elif isinstance(module, PhimoeTopKRouter):
            mixer_margins(scores, 2 * module.router_jitter_noise)
        margins.cut("experts", scores, module.top_k if hasattr(module, "top_k") else module.config.top_k_experts)

    for module in model.modules():
        if type(module).__name__.lower().endswith(("router", "moev1gate")):
            module.register_forward_hook(hook)
