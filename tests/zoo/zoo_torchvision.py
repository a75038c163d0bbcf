"""Every classification and segmentation model that torchvision ships."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.regnet import BlockParams
from zoo_losses import classify

from hetpipe_compiler import Workload

_CLASSES = 10
_SEGMENTATION = "segmentation/"

#: Sizes other than 64 pixels, where the model asks for more; vision transformers take theirs as a setting.
_PIXELS = {"inception_v3": 299, "maxvit_t": 224, "vit_h_14": 56}

#: Models of more than 150 million parameters: another constructor call, and what it changes.
_REDUCED: dict[str, tuple[Any, str]] = {
    "vit_h_14": (
        lambda: models.VisionTransformer(56, 14, 4, 16, 1280, 5120, num_classes=_CLASSES),
        "4 of 32 layers",
    ),
    "vit_l_16": (
        lambda: models.VisionTransformer(64, 16, 6, 16, 1024, 4096, num_classes=_CLASSES),
        "6 of 24 layers",
    ),
    "vit_l_32": (
        lambda: models.VisionTransformer(64, 32, 6, 16, 1024, 4096, num_classes=_CLASSES),
        "6 of 24 layers",
    ),
    "regnet_y_128gf": (
        lambda: models.RegNet(
            BlockParams.from_init_params(depth=27, w_0=112, w_a=40.0, w_m=2.52, group_width=64, se_ratio=0.25),
            num_classes=_CLASSES,
            norm_layer=partial(nn.BatchNorm2d, eps=1e-05, momentum=0.1),
        ),
        "a quarter of the width",
    ),
    "convnext_large": (
        lambda: models.ConvNeXt(
            [
                CNBlockConfig(192, 384, 3),
                CNBlockConfig(384, 768, 3),
                CNBlockConfig(768, 1536, 3),
                CNBlockConfig(1536, None, 3),
            ],
            stochastic_depth_prob=0.5,
            num_classes=_CLASSES,
        ),
        "3 of 27 blocks in the third group",
    ),
}


def names() -> list[str]:
    """Classification first."""
    return [
        *models.list_models(module=models),
        *(_SEGMENTATION + name for name in models.list_models(module=models.segmentation)),
    ]


def note(name: str) -> str:
    """What is reduced."""
    return _REDUCED[name][1] if name in _REDUCED else ""


def workload(name: str) -> Workload:
    """Batch of 2, random weights, cross entropy over all heads."""
    pixels = _PIXELS.get(name, 64)
    segments = name.startswith(_SEGMENTATION)
    shape = (2, pixels, pixels) if segments else (2,)
    return Workload(
        model=_REDUCED[name][0] if name in _REDUCED else lambda: _build(name, pixels),
        loss=classify,
        example=lambda: (torch.zeros(2, 3, pixels, pixels), torch.zeros(shape, dtype=torch.int64)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


def _build(name: str, pixels: int) -> nn.Module:
    settings: dict[str, Any] = {"num_classes": _CLASSES}
    if name.startswith(_SEGMENTATION):
        settings["weights_backbone"] = None
        if not name.endswith("lraspp_mobilenet_v3_large"):
            settings["aux_loss"] = True
    if name.startswith("vit"):
        settings["image_size"] = pixels
    if name in ("googlenet", "inception_v3"):
        settings |= {"init_weights": False, "aux_logits": True}
    return models.get_model(name.removeprefix(_SEGMENTATION), weights=None, **settings)
