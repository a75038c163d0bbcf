"""One small, randomly initialised configuration of each of many architectures of transformers, by its ``model_type``.

Configurations are the library's own with the sizes set down. Dropout stays as it ships. What a table changes beyond
sizes is said in `note`.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from zoo_architectures import ARCHITECTURES, VOCABULARY

from hetpipe_compiler import Workload

_LENGTH = 12
_HEADS = {
    "CausalLM": "AutoModelForCausalLM", "MaskedLM": "AutoModelForMaskedLM", "Seq2SeqLM": "AutoModelForSeq2SeqLM",
    "ImageClassification": "AutoModelForImageClassification",
    "AudioClassification": "AutoModelForAudioClassification", "Spectrogram": "AutoModelForAudioClassification",
    "SpeechSeq2Seq": "AutoModelForSpeechSeq2Seq", "Contrastive": "AutoModel",
}  # fmt: skip


#: Where the automatic class would take another one.
_CLASSES = {"deit": "DeiTForImageClassification", "levit": "LevitForImageClassification"}


#: Submodules kept whole because their work depends on values: which experts a token goes to, which adapter a language
#: has, whether any token attends globally, whether a range has been seen before.
OPAQUE = {
    "switch_transformers": ("*.experts",),
    "xmod": ("roberta.encoder.layer.[0-9].output",),
    "longformer": ("longformer.encoder",),
    "led": ("led.encoder",),
    "ibert": ("*_act", "*_act[12]", "*_activation"),
}


def names() -> list[str]:
    """Model types: decoders, mixtures of experts, encoders, encoder-decoders, vision, speech, two towers."""
    return list(ARCHITECTURES)


def note(name: str) -> str:
    """What differs from the shipped configuration beyond sizes."""
    settings = {**ARCHITECTURES[name][1], **ARCHITECTURES[name][2]}
    notes = []
    if any("layerdrop" in key for key in settings):
        notes.append("no LayerDrop")
    if "apply_spec_augment" in settings:
        notes.append("no SpecAugment")
    if settings.get("attention_type") == "original_full":
        notes.append("full attention")
    if name in OPAQUE:
        notes.append("--opaque " + " ".join(OPAQUE[name]))
    return ", ".join(notes)


def workload(name: str) -> Workload:
    """Batch of 2, the model's own loss."""
    head, base, more = ARCHITECTURES[name]
    config = transformers.AutoConfig.for_model(name, **{**base, **more})
    for name_of_cache in ("use_cache", "use_mems_train"):
        if hasattr(config, name_of_cache):
            setattr(config, name_of_cache, False)
    own_class = _CLASSES.get(name)

    def make() -> nn.Module:
        if own_class is not None:
            return getattr(transformers, own_class)(config)
        return getattr(transformers, _HEADS[head]).from_config(config)

    return Workload(
        model=make,
        loss=None,
        example=lambda: _batch(head, config),
        targets=0,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    )


def _batch(head: str, config: Any) -> dict[str, Any]:
    """Inputs by name. Ids start after the special ones."""
    draw = torch.Generator().manual_seed(5)

    def ids(length: int, top: int) -> torch.Tensor:
        return torch.randint(4, top, (2, length), generator=draw)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(2, *shape, generator=draw)

    labels = torch.tensor([1, 3])
    if head in ("CausalLM", "MaskedLM"):
        tokens = ids(_LENGTH, VOCABULARY)
        mask = torch.ones_like(tokens)
        return {"input_ids": tokens, "attention_mask": mask, "labels": ids(_LENGTH, VOCABULARY)}
    if head == "Seq2SeqLM":
        tokens = ids(_LENGTH, VOCABULARY)
        labels_length = _LENGTH if config.model_type == "fsmt" else 8
        batch = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "labels": ids(labels_length, VOCABULARY),
        }
        if config.model_type == "fsmt":
            # Left out, it is made from the ids' values, and then depends on whether there is any padding.
            batch["decoder_attention_mask"] = torch.ones_like(batch["labels"])
        return batch
    if head == "ImageClassification":
        size = getattr(config, "image_size", 64)
        size = size["height"] if isinstance(size, dict) else size[0] if isinstance(size, (list, tuple)) else size
        return {"pixel_values": floats(3, size, size), "labels": labels}
    if head == "AudioClassification":
        return {"input_values": floats(400), "labels": labels}
    if head == "Spectrogram":
        return {"input_values": floats(24, 16), "labels": labels}
    if head == "SpeechSeq2Seq":
        features = floats(16, 24) if config.model_type == "whisper" else floats(24, 16)
        return {"input_features": features, "labels": ids(6, VOCABULARY)}
    assert head == "Contrastive"
    return {"input_ids": ids(_LENGTH, VOCABULARY), "pixel_values": floats(3, 32, 32), "return_loss": True}
