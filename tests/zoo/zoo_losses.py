"""Losses over whatever a model returns."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.utils import _pytree as pytree


def classify(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every result with classes in dimension 1: main and auxiliary heads alike."""
    logits = [leaf for leaf in _tensors(output) if leaf.is_floating_point()]
    losses = [functional.cross_entropy(one, target) for one in logits]
    return torch.stack(losses).sum()


def mean_square(output: Any, _target: torch.Tensor) -> torch.Tensor:
    """Of the first floating-point tensor of an output; the target plays no part."""
    return next(leaf for leaf in _tensors(output) if leaf.is_floating_point()).square().mean()


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, dict):
        output = list(output.values())
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
