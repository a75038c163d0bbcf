"""The workloads that predictions are checked on: ``--set name=`` resnet50, vit_b_16 or gpt2, in small batches."""

from __future__ import annotations

import torch
from torch import nn

from hetpipe_compiler import Workload

_VISION = ("resnet50", "vit_b_16")


def workload(name: str = "resnet50", batch_size: int = 4, seq_len: int = 64) -> Workload:
    """``--set`` names: name, batch_size, seq_len (of gpt2)."""
    if name in _VISION:
        return _vision(name, batch_size)
    if name == "gpt2":
        return _gpt2(batch_size, seq_len)
    raise ValueError(f"name is one of {', '.join((*_VISION, 'gpt2'))}, not {name}")


def _vision(name: str, batch_size: int) -> Workload:
    import torchvision

    return Workload(
        model=lambda: torchvision.models.get_model(name, weights=None),
        loss=nn.functional.cross_entropy,
        example=lambda: (torch.randn(batch_size, 3, 224, 224), torch.randint(0, 1000, (batch_size,))),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    )


def _gpt2(batch_size: int, seq_len: int) -> Workload:
    from transformers import GPT2Config, GPT2LMHeadModel

    def example() -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 50257, (batch_size, seq_len))
        return {"input_ids": tokens, "labels": tokens.clone()}

    return Workload(
        model=lambda: GPT2LMHeadModel(GPT2Config()),
        example=example,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
