"""A request as packed rows, whatever form its tokens came in, and the way back. Knows no bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from service.errors import InvalidInput
from service.memory import Memory
from service.packing import Float32, Int64, drop_padding, restore_padding

MAX_ELEMENTS: Final = 1 << 40  # beyond any body; keeps products of shapes far from overflow
MAX_RANK: Final = 8


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """What a model takes and gives, as far as the wire is concerned. Compared by identity: it is a key of caches."""

    name: str  # as the client wrote it
    version: str
    d_in: int
    d_out: int
    has_sequences: bool
    d_memory: int | None = None  # a model with cross-attention takes one memory of this width per sequence


@dataclass(slots=True)  # not frozen: that costs 2 us a request
class Decoded:
    """A request as arrays, and how its answer is to be written."""

    tokens: Float32  # (rows, d_in), packed; a view of the body unless padding was dropped
    seq_lens: Int64 | None  # (sequences,), all positive; None for position-wise models
    batch: tuple[int, int] | None = None  # (batch, seq) when the tokens came as [batch, seq, d]
    padded_lens: Int64 | None = None  # (batch,) when that batch was right-padded
    id: str | None = None
    binary: bool = False
    npy: bool = False
    timeout_s: float | None = None
    memory: Memory | None = None  # one for each of seq_lens, where the model takes it
    priority: int = 0  # 1 is the highest; 0: the service's default
    isolate: bool = False  # alone in its windows


def arrange(signature: Signature, values: Float32, shape: list[int], lens: Int64 | None, **rest: Any) -> Decoded:
    """Flat values and their shape -> packed rows and the sequences' lengths."""
    if len(shape) == 3:
        return _batch(signature, values.reshape(shape), lens, rest)
    tokens = values.reshape(shape)
    if not signature.has_sequences:
        if lens is not None:
            raise InvalidInput("seq_lens: this model is position-wise and takes none with [tokens, d]")
        return Decoded(tokens, None, **rest)
    if lens is None:
        lens = np.array([len(tokens)], np.int64)
    check_lengths(lens, len(tokens))
    total = int(lens.sum())
    if total != len(tokens):
        raise InvalidInput(f"seq_lens: they add up to {total}, tokens has {len(tokens)} rows")
    return Decoded(tokens, lens[lens > 0], **rest)


def _batch(signature: Signature, tokens: Float32, lens: Int64 | None, rest: dict[str, Any]) -> Decoded:
    batch, seq, width = tokens.shape
    if lens is None:
        full = np.full(batch if seq else 0, seq, np.int64)
        return Decoded(tokens.reshape(-1, width), full if signature.has_sequences else None, (batch, seq), **rest)
    if len(lens) != batch:
        raise InvalidInput(f"seq_lens: {len(lens)} entries for a batch of {batch}")
    check_lengths(lens, seq)
    packed = drop_padding(tokens, lens)
    return Decoded(packed, lens[lens > 0] if signature.has_sequences else None, (batch, seq), lens, **rest)


def check_lengths(lens: Int64, most: int, name: str = "seq_lens") -> None:
    """Every length within 0..most, so that their sum cannot overflow."""
    strange = np.flatnonzero((lens < 0) | (lens > most))
    if len(strange):
        at = int(strange[0])
        raise InvalidInput(f"{name}[{at}]: found {int(lens[at])}, expected 0 to {most}")


def in_kind(request: Decoded, out: Float32) -> Float32:
    """`out` (rows, d_out) as [batch, seq, d_out] if the tokens came so, with zeros for the padding."""
    if request.batch is None:
        return out
    if request.padded_lens is not None:
        return restore_padding(out, request.padded_lens, request.batch[1])
    return out.reshape(*request.batch, out.shape[1])


def check_shape(shape: Any, where: str) -> list[int]:
    """`shape` as whole numbers >= 0, none of them beyond what a body can hold, zeros among them or not."""
    if not isinstance(shape, list | tuple) or any(type(n) is not int or n < 0 for n in shape):
        raise InvalidInput(f"{where}: found {show(shape)}, expected whole numbers >= 0")
    if len(shape) > MAX_RANK or prod(max(n, 1) for n in shape) > MAX_ELEMENTS:
        raise InvalidInput(f"{where}: {show(shape)} is more than any body can hold")
    return list(shape)


def token_shape(shape: list[int], datatype: str, signature: Signature) -> list[int]:
    """`shape` if it is [tokens, d] or [batch, seq, d] of FP32, else InvalidInput."""
    if len(shape) not in (2, 3):
        raise InvalidInput(f"tokens: shape {shape} has rank {len(shape)}, expected [tokens, d] or [batch, seq, d]")
    if shape[-1] != signature.d_in:
        raise InvalidInput(f"tokens: shape {shape} has width {shape[-1]}, expected {signature.d_in}")
    if datatype != "FP32":
        raise InvalidInput(f"tokens: datatype {show(datatype)}, expected 'FP32'")
    return shape


def memory_shape(shape: list[int], datatype: str, rank: int, signature: Signature) -> list[int]:
    """`shape` if it is FP32 [m, d_memory] beside packed tokens (rank 2), [batch, mem, d_memory] beside a batch (3)."""
    if len(shape) != rank:
        wanted = "[m, d_memory]" if rank == 2 else "[batch, mem, d_memory]"
        raise InvalidInput(
            f"memory: shape {shape} has rank {len(shape)}, expected {wanted} beside tokens of rank {rank}"
        )
    if shape[-1] != signature.d_memory:
        raise InvalidInput(f"memory: shape {shape} has width {shape[-1]}, expected {signature.d_memory}")
    if datatype != "FP32":
        raise InvalidInput(f"memory: datatype {show(datatype)}, expected 'FP32'")
    return shape


def show(value: Any) -> str:
    """A client's value for an error message: short, whatever it is, and never by recursion into it."""
    if isinstance(value, list | tuple):
        if len(value) <= MAX_RANK and not any(isinstance(item, list | tuple | dict) for item in value):
            return "[" + ", ".join(map(show, value)) + "]"
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return f"an object of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print the longest ones
        return f"a number of {value.bit_length()} bits"
    text = repr(value[:60] if isinstance(value, str | bytes) else value)
    return text if len(text) <= 80 else text[:77] + "..."
