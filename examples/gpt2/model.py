"""GPT-2 (124 million parameters by default) from transformers, with random weights and its tied embeddings.

The text is Python's own language reference, which every Python carries (`pydoc_data.topics`), read byte by byte: real
text and nothing to download. Its length differs a little between Python releases.
"""

from __future__ import annotations

import math
from functools import cache
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

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
    batch_size: int = 8,
    seq_len: int = 256,
    n_layer: int = 12,
    n_embd: int = 768,
    n_head: int = 12,
    vocab_size: int = 50257,
    dropout: float = 0.1,
    lr: float = 3e-4,
) -> Workload:
    """``--set`` names: batch_size, seq_len, n_layer, n_embd, n_head, vocab_size (at least 256: bytes), dropout, lr.

    Raises:
        ValueError: the vocabulary has no room for all byte values.
    """
    if vocab_size < 256:
        raise ValueError(f"vocab_size is {vocab_size}; the text is bytes, so it must be at least 256")

    def model() -> nn.Module:
        config = GPT2Config(
            vocab_size=vocab_size,
            n_positions=max(seq_len, 1024),
            n_layer=n_layer,
            n_embd=n_embd,
            n_head=n_head,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        network = GPT2LMHeadModel(config)
        # transformers finds this loss by itself too, after a warning.
        network.loss_type = "ForCausalLM"
        return network

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
