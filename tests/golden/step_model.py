"""The text model of Step-3.7-Flash as a model of its own, as Step-3.5-Flash is published."""

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel


class Step3p5ForCausalLM(Step3p7PreTrainedModel, GenerationMixin):
    """transformers has the text model alone, without a head."""

    config: Step3p7TextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, past_key_values=None, logits_to_keep=0, **kwargs):
        output = self.model(input_ids, cache=past_key_values, **kwargs)
        return CausalLMOutputWithPast(logits=self.lm_head(output.last_hidden_state[:, -logits_to_keep:]))


def name_published_tensors():
    """Lets this class read and write the names that published files have, those of Step-3.7-Flash."""
    mapping = get_checkpoint_conversion_mapping("step3p7")
    of_layers = [part for part in mapping if any("mlp" in target for target in part.target_patterns)]
    register_checkpoint_conversion_mapping("step3p5", of_layers)
