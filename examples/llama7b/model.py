"""Llama with 7 billion parameters (the first generation's "7B") from transformers, with random weights.

Built on meta it takes no memory, so it is planned on any machine; its weights alone take 27 GB: give
`hetpipe-compile --no-weights`, which leaves them to the machines that train. The text is Python's own language
reference, which every Python carries (`pydoc_data.topics`), read byte by byte.
"""

from __future__ import annotations

import math
from functools import cache
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from hetpipe_compiler import Workload

#: One sequence in so many is held out for evaluation, up to so many in all.
HOLD_OUT_EVERY = 20
MOST_HELD_OUT = 32


@cache
def load_split(seq_len: int) -> tuple[Tensor, Tensor]:
    """Training and held-out sequences: int64 tensors (sequences, seq_len) of byte values."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    count = len(text) // seq_len
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: count * seq_len].long().view(count, seq_len)
    held_out = torch.arange(count) % HOLD_OUT_EVERY == 0
    return tokens[~held_out], tokens[held_out][:MOST_HELD_OUT]


def batch_of(tokens: Tensor) -> dict[str, Tensor]:
    """The model shifts the labels by itself; a copy, so that the batch holds two tensors that share nothing."""
    return {"input_ids": tokens, "labels": tokens.clone()}


def workload(
    batch_size: int = 4,
    seq_len: int = 1024,
    layers: int = 32,
    hidden: int = 4096,
    intermediate: int = 11008,
    heads: int = 32,
    vocab_size: int = 32000,
    lr: float = 3e-4,
) -> Workload:
    """``--set`` names: batch_size, seq_len, layers, hidden, intermediate, heads, vocab_size (at least 256: bytes), lr.

    Raises:
        ValueError: the vocabulary has no room for all byte values.
    """
    if vocab_size < 256:
        raise ValueError(f"vocab_size is {vocab_size}; the text is bytes, so it must be at least 256")

    def model() -> nn.Module:
        config = LlamaConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=max(seq_len, 2048),
            use_cache=False,
        )
        return LlamaForCausalLM(config)

    def data(shard: int, num_shards: int, seed: int) -> list[dict[str, Tensor]]:
        tokens, _ = load_split(seq_len)
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
        return [batch_of(tokens[picked]) for picked in order[shard::num_shards].split(batch_size)]

    def evaluate(trained: nn.Module) -> dict[str, float]:
        _, tokens = load_split(seq_len)
        device = next(trained.parameters()).device
        with torch.no_grad():
            losses = [trained(**batch_of(part.to(device))).loss.item() * len(part) for part in tokens.split(batch_size)]
        loss = sum(losses) / len(tokens)
        return {"test_loss": loss, "bits_per_byte": loss / math.log(2)}

    return Workload(
        model=model,
        example=lambda: batch_of(torch.zeros(batch_size, seq_len, dtype=torch.int64)),
        targets=0,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        data=data,
        evaluate=evaluate,
    )
