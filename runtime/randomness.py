"""Seeds: every random number of a run is a function of the run's seed and of where it is used."""

from __future__ import annotations

import hashlib
import random


def _seed(*parts: int | str) -> int:
    """The first 8 bytes of BLAKE2b over the parts joined by ``:``, as a non-negative 63-bit integer."""
    text = ":".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def minibatch_seed(seed: int, vw: int, minibatch: int, stage: int) -> int:
    """What a stage seeds torch with before F(minibatch), and before its recomputation (dropout and the like)."""
    return _seed("minibatch", seed, vw, minibatch, stage)


def data_seed(seed: int, vw: int, minibatch: int) -> int:
    """What stage 0 seeds with before it fetches the batch of ``minibatch`` (augmentations)."""
    return _seed("data", seed, vw, minibatch)


def epoch_seed(seed: int, epoch: int) -> int:
    """The ``seed`` argument of ``Workload.data`` in ``epoch`` (from 0): the same for all virtual workers; fits 31 bits.

    31 bits because NumPy, and much user code, takes no more than 32.
    """
    return _seed("epoch", seed, epoch) >> 32


def seed_torch(value: int) -> None:
    """Seed torch's generators: the CPU's, and those of CUDA devices in use."""
    import torch

    # Not torch.manual_seed: while CUDA lies unused, that formats a stack trace at every call, for a later replay.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)


def seed_everything(value: int) -> None:
    """Seed torch, NumPy's global generator and Python's ``random``: what user code that makes batches may draw from."""
    import numpy as np

    seed_torch(value)
    np.random.seed(value & 0xFFFFFFFF)
    random.seed(value)
