"""BERT enlarged to 4.9 billion parameters (96 layers of width 2048) from transformers: masked-language training.

Built on meta it takes no memory, so it is planned on any machine; its weights alone take 20 GB: give
`hetpipe-compile --no-weights`, which leaves them to the machines that train. The text is Python's own language
reference, which every Python carries (`pydoc_data.topics`), read byte by byte.
"""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

from hetpipe_compiler import Workload

#: One sequence in so many is held out for evaluation, up to so many in all.
HOLD_OUT_EVERY = 20
MOST_HELD_OUT = 32
#: The token behind the byte values, in the place of what the model must find.
MASK = 256
MASKED = 0.15
#: A label that the loss leaves out.
UNASKED = -100


@cache
def load_split(seq_len: int) -> tuple[Tensor, Tensor]:
    """Training and held-out sequences: int64 tensors (sequences, seq_len) of byte values."""
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    count = len(text) // seq_len
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: count * seq_len].long().view(count, seq_len)
    held_out = torch.arange(count) % HOLD_OUT_EVERY == 0
    return tokens[~held_out], tokens[held_out][:MOST_HELD_OUT]


def batch_of(tokens: Tensor) -> dict[str, Tensor]:
    """Tokens with some masked, always the same ones of a position and a token; labels only where they are."""
    position = torch.arange(tokens.shape[1])
    masked = (tokens * 2654435761 + position * 40503) % 1000 < 1000 * MASKED
    return {"input_ids": tokens.masked_fill(masked, MASK), "labels": tokens.masked_fill(~masked, UNASKED)}


def workload(
    batch_size: int = 4,
    seq_len: int = 512,
    layers: int = 96,
    hidden: int = 2048,
    heads: int = 32,
    vocab_size: int = 30522,
    dropout: float = 0.1,
    lr: float = 1e-4,
) -> Workload:
    """``--set`` names: batch_size, seq_len, layers, hidden, heads, vocab_size (at least 257), dropout, lr.

    Raises:
        ValueError: the vocabulary has no room for all byte values and the mask.
    """
    if vocab_size <= MASK:
        raise ValueError(f"vocab_size is {vocab_size}; bytes and the mask need {MASK + 1}")

    def model() -> nn.Module:
        config = BertConfig(
            vocab_size=vocab_size,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * hidden,
            max_position_embeddings=max(seq_len, 512),
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
        return BertForMaskedLM(config)

    def data(shard: int, num_shards: int, seed: int) -> list[dict[str, Tensor]]:
        tokens, _ = load_split(seq_len)
        order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(seed))
        return [batch_of(tokens[picked]) for picked in order[shard::num_shards].split(batch_size)]

    def evaluate(trained: nn.Module) -> dict[str, float]:
        _, tokens = load_split(seq_len)
        device = next(trained.parameters()).device
        right = asked = 0
        with torch.no_grad():
            for part in tokens.split(batch_size):
                batch = batch_of(part)
                found = trained(input_ids=batch["input_ids"].to(device)).logits.argmax(-1).cpu()
                right += int((found == batch["labels"]).sum())
                asked += int((batch["labels"] != UNASKED).sum())
        return {"masked_accuracy": right / asked}

    return Workload(
        model=model,
        example=lambda: batch_of(torch.zeros(batch_size, seq_len, dtype=torch.int64)),
        targets=0,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        data=data,
        evaluate=evaluate,
    )
