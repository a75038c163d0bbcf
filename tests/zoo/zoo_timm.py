"""One hundred timm models: the smallest of each of its families, and a second one of some large families."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import nn
from zoo_losses import classify, mean_square

from hetpipe_compiler import Workload

_CLASSES = 10

#: Models of more than 150 million parameters: settings that reduce them, and what they change.
_REDUCED: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek_vit_412m": ({"depth": 4}, "4 layers"),
    "gemma4_vit_167m_enc": ({"depth": 4}, "4 layers"),
}

#: Encoders that return features whatever number of classes they are asked for.
_HEADLESS = {"gemma4_vit_167m_enc"}

#: Name -> family (timm's module), pixels, and whether the model must be told of them.
_MODELS: dict[str, tuple[str, int, bool]] = {
    "beit_base_patch16_224": ("beit", 64, True),
    "halonet_h1": ("byoanet", 256, True),
    "gernet_s": ("byobnet", 64, True),
    "mobileone_s0": ("byobnet", 64, True),
    "cait_xxs24_224": ("cait", 64, True),
    "coat_tiny": ("coat", 64, True),
    "convit_tiny": ("convit", 64, True),
    "convmixer_768_32": ("convmixer", 64, False),
    "convnext_atto_rms": ("convnext", 64, False),
    "cpubone_nano": ("cpubone", 64, False),
    "crossvit_tiny_240": ("crossvit", 64, False),
    "csatv2": ("csatv2", 64, False),
    "cs3darknet_s": ("cspnet", 64, False),
    "cspnext_tiny": ("cspnext", 64, False),
    "davit_tiny": ("davit", 64, False),
    "deepseek_vit_412m": ("deepseek_vit", 224, True),
    "deit_tiny_patch16_224": ("deit", 64, True),
    "densenet121": ("densenet", 64, False),
    "dla46x_c": ("dla", 64, False),
    "dpn48b": ("dpn", 64, False),
    "edgenext_xx_small": ("edgenext", 64, False),
    "efficientformer_l1": ("efficientformer", 224, True),
    "efficientformerv2_s0": ("efficientformer_v2", 64, True),
    "mnasnet_small": ("efficientnet", 64, False),
    "efficientvim_m1": ("efficientvim", 64, False),
    "efficientvit_b0": ("efficientvit_mit", 64, False),
    "efficientvit_m0": ("efficientvit_msra", 64, True),
    "vit_tiny_patch16_dinov3_qkvb": ("eva", 64, True),
    "fasternet_t0": ("fasternet", 64, False),
    "fastvit_t8": ("fastvit", 64, False),
    "focalnet_tiny_srf": ("focalnet", 64, False),
    "gcvit_xxtiny": ("gcvit", 64, True),
    "gemma4_vit_167m_enc": ("gemma4_vit", 96, True),
    "ghostnet_050": ("ghostnet", 64, False),
    "hardcorenas_b": ("hardcorenas", 64, False),
    "hgnetv2_b0": ("hgnet", 64, False),
    "hiera_tiny_224": ("hiera", 64, True),
    "sam2_hiera_tiny": ("hieradet_sam2", 64, False),
    "hrnet_w18_small": ("hrnet", 64, False),
    "iformer_t": ("iformer", 64, False),
    "inception_next_atto": ("inception_next", 64, False),
    "inception_resnet_v2": ("inception_resnet_v2", 96, False),
    "inception_v3": ("inception_v3", 96, False),
    "inception_v4": ("inception_v4", 96, False),
    "lcnetv2_small": ("lcnetv2", 64, False),
    "levit_128s": ("levit", 64, True),
    "lowformer_b0": ("lowformer", 64, False),
    "mambaout_femto": ("mambaout", 64, False),
    "maxvit_pico_rw_256": ("maxxvit", 64, True),
    "caformer_s18": ("metaformer", 64, False),
    "gmlp_ti16_224": ("mlp_mixer", 64, True),
    "mobilenetv3_small_050": ("mobilenetv3", 64, False),
    "mobilenetv4_conv_small_035": ("mobilenetv3", 64, False),
    "mobilenetv5_base": ("mobilenetv5", 64, False),
    "mobilevit_xxs": ("mobilevit", 64, True),
    "mvitv2_tiny": ("mvitv2", 64, True),
    "naflexvit_base_patch16_gap": ("naflexvit", 64, True),
    "nasnetalarge": ("nasnet", 64, False),
    "nest_tiny": ("nest", 64, True),
    "nextvit_small": ("nextvit", 64, False),
    "nf_regnet_b0": ("nfnet", 64, False),
    "pit_ti_224": ("pit", 64, True),
    "pnasnet5large": ("pnasnet", 64, False),
    "pvt_v2_b0": ("pvt_v2", 64, False),
    "qwen3_vit_88m": ("qwen3_vit", 64, True),
    "rdnet_tiny": ("rdnet", 64, False),
    "regnetx_002": ("regnet", 64, False),
    "repghostnet_050": ("repghost", 64, False),
    "repvit_m1": ("repvit", 64, True),
    "res2next50": ("res2net", 64, False),
    "resnest14d": ("resnest", 64, False),
    "resnet18": ("resnet", 64, False),
    "resnetv2_18": ("resnetv2", 64, False),
    "rexnet_100": ("rexnet", 64, False),
    "selecsls42": ("selecsls", 64, False),
    "legacy_seresnet18": ("senet", 64, False),
    "sequencer2d_s": ("sequencer", 64, True),
    "shvit_s1": ("shvit", 64, False),
    "skresnet18": ("sknet", 64, False),
    "starnet_s050": ("starnet", 64, False),
    "swiftformer_xs": ("swiftformer", 64, True),
    "swin_tiny_patch4_window7_224": ("swin_transformer", 64, True),
    "swinv2_tiny_window16_256": ("swin_transformer_v2", 64, True),
    "swinv2_cr_tiny_224": ("swin_transformer_v2_cr", 64, True),
    "tiny_vit_5m_224": ("tiny_vit", 64, False),
    "tnt_s_legacy_patch16_224": ("tnt", 64, True),
    "tresnet_m": ("tresnet", 64, False),
    "twins_svt_small": ("twins", 64, True),
    "vgg11": ("vgg", 64, False),
    "visformer_tiny": ("visformer", 64, True),
    "vit_tiny_patch16_224": ("vision_transformer", 64, True),
    "vit_tiny_r_s16_p8_224": ("vision_transformer_hybrid", 64, True),
    "vit_srelpos_small_patch16_224": ("vision_transformer_relpos", 64, True),
    "samvit_base_patch16_224": ("vision_transformer_sam", 64, True),
    "vitamin_small_224": ("vitamin", 64, True),
    "volo_d1_224": ("volo", 64, True),
    "ese_vovnet19b_slim": ("vovnet", 64, False),
    "legacy_xception": ("xception", 64, False),
    "xception41p": ("xception_aligned", 64, False),
    "xcit_nano_12_p8_224": ("xcit", 64, True),
}


def names() -> list[str]:
    """Family by family."""
    return list(_MODELS)


def note(name: str) -> str:
    """What is reduced."""
    return _REDUCED[name][1] if name in _REDUCED else ""


def workload(name: str) -> Workload:
    """Batch of 2, random weights, cross entropy over all heads."""
    _, pixels, told = _MODELS[name]
    settings: dict[str, Any] = dict(_REDUCED[name][0]) if name in _REDUCED else {}
    if told:
        settings["img_size"] = pixels

    def make() -> nn.Module:
        model: nn.Module = timm.create_model(name, num_classes=_CLASSES, **settings)
        return model

    return Workload(
        model=make,
        loss=mean_square if name in _HEADLESS else classify,
        example=lambda: (torch.zeros(2, 3, pixels, pixels), torch.zeros(2, dtype=torch.int64)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
