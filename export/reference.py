"""The file `reference.npz` of a bundle: inputs and the module's float64 answers, so that verify needs no torch.

Arrays `tokens_<i>` float32, `seq_lens_<i>` int64 and `out_<i>` float32 (rounded from float64); with a memory also
`memory_<i>` float32 and `memory_seq_lens_<i>` int64; with layers that route tokens to
experts `logits_<i>_<layer>` float32 of each router and `top_k_<i>_<layer>` int64.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from export.relative_error import Float64
from export.routed import RoutedLayer
from service.errors import BundleError
from service.memory import Memory
from service.packing import Float32

REFERENCE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Tokens, how they divide into sequences, and the module's answer in float64."""

    tokens: Float32  # (N, d_in)
    seq_lens: tuple[int, ...]  # sum N; one entry for position-wise modules
    reference: Float64  # (N, d_out)
    memory: Memory | None = None  # one for each of seq_lens, where the module takes it
    routed: tuple[RoutedLayer, ...] = ()  # one for each layer of experts, in the order they run


def write_reference(path: Path, cases: Sequence[Case]) -> int:
    """Write the cases, smallest first, as many as fit into 1 MiB, at least one. Returns how many."""
    arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {}
    size = 0
    count = 0
    for case in sorted(cases, key=lambda case: len(case.tokens)):
        size += case.tokens.nbytes + case.reference.nbytes // 2
        size += 0 if case.memory is None else case.memory.rows.nbytes
        if count and size > REFERENCE_BYTES:
            break
        arrays[f"tokens_{count}"] = case.tokens
        arrays[f"seq_lens_{count}"] = np.array(case.seq_lens, dtype=np.int64)
        arrays[f"out_{count}"] = case.reference.astype(np.float32)
        if case.memory is not None:
            arrays[f"memory_{count}"] = case.memory.rows
            arrays[f"memory_seq_lens_{count}"] = case.memory.seq_lens
        for layer, routed in enumerate(case.routed):
            arrays[f"logits_{count}_{layer}"] = routed.logits.astype(np.float32)
            arrays[f"top_k_{count}_{layer}"] = np.array(routed.top_k)
        count += 1
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    return count


def read_references(path: Path) -> list[Case]:
    """Read `tokens_i`, `seq_lens_i` (absent: one sequence), `out_i` and the memory, for i = 0, 1, ...

    Raises:
        BundleError: the file cannot be read or holds no complete pair.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, zipfile.BadZipFile) as cause:
        raise BundleError(f"{path}: not a readable npz file: {cause}") from cause
    count = sum(name.startswith("tokens_") for name in arrays)
    missing = [f"{part}_{i}" for i in range(count) for part in ("tokens", "out") if f"{part}_{i}" not in arrays]
    missing += [part for name in arrays if name.startswith("top_k") if (part := f"logits{name[5:]}") not in arrays]
    if missing or not count:
        raise BundleError(f"{path}: no array {missing[0] if missing else 'tokens_0'!r}")
    return [
        Case(
            tokens=arrays[f"tokens_{i}"].astype(np.float32),
            seq_lens=tuple(arrays.get(f"seq_lens_{i}", np.array([len(arrays[f"tokens_{i}"])])).tolist()),
            reference=arrays[f"out_{i}"].astype(np.float64),
            memory=_memory(arrays, i),
            routed=_routed(arrays, i),
        )
        for i in range(count)
    ]


def _memory(arrays: dict[str, npt.NDArray[Any]], i: int) -> Memory | None:
    if f"memory_{i}" not in arrays:
        return None
    rows = arrays[f"memory_{i}"].astype(np.float32)
    lens = arrays.get(f"memory_seq_lens_{i}", np.array([len(rows)]))
    return Memory(rows, np.cumsum(lens, dtype=np.int64))


def _routed(arrays: Mapping[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]], i: int) -> tuple[RoutedLayer, ...]:
    layers = sum(name.startswith(f"top_k_{i}_") for name in arrays)
    return tuple(
        RoutedLayer(arrays[f"logits_{i}_{layer}"].astype(np.float64), int(arrays[f"top_k_{i}_{layer}"]))
        for layer in range(layers)
    )
