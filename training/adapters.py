"""Adapters: low-rank updates of a drafter's linear maps, trained in place of its weights, by peft.

They exist in training alone. What is measured and published is a plain drafter whose weights the
updates were added to, so that nothing that loads or decodes one knows of them.
Source: LoRA (Hu et al. 2022, arXiv 2106.09685).
"""

from copy import deepcopy

from torch import nn

from drafters.adapter import fold
from drafters.base import NeuralDrafter
from training.options import OptimSettings


def add_adapters(drafter: NeuralDrafter, settings: OptimSettings) -> None:
    """Give every linear map an adapter that changes nothing yet; freeze all else.

    Args:
        drafter: changed in place.
        settings: lora_rank and lora_alpha.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linear = [name for name, module in drafter.named_modules() if isinstance(module, nn.Linear)]
    config = LoraConfig(r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=linear)
    inject_adapter_in_model(config, drafter)


def merged(drafter: NeuralDrafter) -> NeuralDrafter:
    """Return the drafter itself, or, if it has adapters, a plain copy with them merged."""
    if not hasattr(drafter, "peft_config"):
        return drafter
    plain = deepcopy(drafter)
    fold(plain)
    return plain.requires_grad_(True)
