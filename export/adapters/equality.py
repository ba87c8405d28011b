"""The float64 proof that a packed module computes what the original does, sequence by sequence.

Every adapter ends here. It trusts no class name: the original's own forward is run on one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from export.errors import ExportError, ProofError, first_line
from export.packed import Packed
from export.precision import float64, float64_layer_by_layer

EQUALS: Final = "equals the original module, per sequence"
SEQ_LENS: Final = ((3,), (1, 5, 9, 2), (17, 1))
BAR: Final = 1e-12  # float64 has 2e-16; measured 1e-15


def prove_equal(
    original: nn.Module,
    packed: Packed,
    *,
    one_sequence: Callable[..., Tensor] | None = None,
    layers: Sequence[nn.Module] | None = None,
    seq_lens: Sequence[tuple[int, ...]] = SEQ_LENS,
    seed: int = 0,
    bar: float = BAR,
    hint: str = "",
) -> Packed:
    """Compare `packed` with `original` at ragged lengths, in float64, relative to the norm of the whole answer.

    Args:
        original: the exportable copy that the adapter was given, float32; it may share its weights with `packed`.
        packed: what the adapter made of it; "sequence" or "position-wise".
        one_sequence: runs the original on float64 rows (n, d_in), and its memory (m, d_memory) where `packed` takes
            one, and returns (n, d_out); None: the original itself.
        layers: parts of the original, which are float64 one at a time as they are called; None: all of it at once.
        seq_lens: the windows to compare.
        seed: of the random tokens.
        bar: largest relative error allowed.
        hint: ends the message of a difference.

    Returns:
        `packed` with the error among its proofs.

    Raises:
        ExportError: the original or the packed module cannot be run so.
        ProofError: they differ, or an answer is not finite.
    """
    name = type(original).__name__
    run = one_sequence if one_sequence is not None else original
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    for lengths in seq_lens:
        tokens = torch.randn(sum(lengths), packed.d_in, generator=generator, dtype=torch.float64)
        parts, more = [_split(tokens, lengths)], [torch.tensor(lengths)] if packed.kind == "sequence" else []
        if packed.d_memory is not None:
            memory_lengths = _memory_lengths(lengths)
            rows = torch.randn(sum(memory_lengths), packed.d_memory, generator=generator, dtype=torch.float64)
            parts.append(_split(rows, memory_lengths))
            more += [rows, torch.tensor(memory_lengths)]
        with _as_export_error(f"{name} failed in float64"):
            upcast = float64(original) if layers is None else float64_layer_by_layer(layers)
            with upcast, _no_fast_path():
                expected = torch.cat([run(*part) for part in zip(*parts, strict=True)])
        with _as_export_error(f"the packed {name} failed in float64"), float64_layer_by_layer(packed.layers):
            found: Tensor = packed.module(tokens, *more)
        worst = max(worst, _compare(name, found, expected, lengths, bar, hint))
    return replace(packed, proofs={**packed.proofs, EQUALS: worst})


def _memory_lengths(seq_lens: tuple[int, ...]) -> tuple[int, ...]:
    """1 to 13 rows for each sequence, as ragged as they are and unlike them."""
    return tuple((5 * length + 3 * index) % 13 + 1 for index, length in enumerate(seq_lens))


def _compare(name: str, found: Tensor, expected: Tensor, seq_lens: tuple[int, ...], bar: float, hint: str) -> float:
    if found.shape != expected.shape:
        raise ProofError(f"{name} gives {tuple(expected.shape)}, its packed form {tuple(found.shape)}")
    scale = expected.norm().clamp_min(torch.finfo(expected.dtype).tiny)  # a LayerNorm of width 1 gives zeros
    error = float((found - expected).norm() / scale)
    if not error <= bar:
        raise ProofError(
            f"{name} does not compute what its weights say: it differs by {error:.1e} (relative) from its packed form "
            f"at sequence lengths {list(seq_lens)}, allowed {bar:.0e}{hint and f'; {hint}'}"
        )
    return error


def _split(tokens: Tensor, seq_lens: tuple[int, ...]) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = tokens.split(list(seq_lens))  # type: ignore[no-untyped-call]
    return parts


@contextmanager
def _as_export_error(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as cause:
        raise ExportError(f"{what}: {first_line(cause)}") from cause


@contextmanager
def _no_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
