"""The tokens that calibrate: the user's own or synthetic, and what the float graph makes of them at each matmul.

It runs ONNX Runtime on the float graph and keeps a bounded number of bytes. It decides nothing about integers.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

from export.errors import ExportError, first_line
from service.cpu import cpu_quota
from service.manifest import SYNTHETIC, Kind, file_sha256
from service.packing import Float32, Int64
from service.session import open_session

if TYPE_CHECKING:
    from export.packed import Packed

Sequences = tuple[Float32, Int64]  # rows (n, d) and the lengths of their sequences (s,), sum n
Feeds = Mapping[str, npt.NDArray[np.generic]]  # name of a graph input -> array

MAX_TOKENS: Final = 4096  # of a user's file; more move no scale by a digit that counts, and each costs a float run
_RUN_TOKENS: Final = 1024  # of one run of the float graph
_SYNTHETIC_LENGTH: Final = 64
LONG: Final = 256  # of synthetic sequences beside a user's own: positions that short texts do not reach
_KEPT_BYTES: Final = 512 << 20  # activations of as many matmuls at a time


@dataclass(frozen=True)
class Calibration:
    """Tokens to calibrate on, in runs of the float graph.

    source: what they are, for the manifest.
    synthetic: nobody has shown that the model meets such tokens.
    beside: tokens unlike these, which nothing is chosen on, and which it must not be fitted away from.
    """

    feeds: Sequence[Feeds]
    source: str
    synthetic: bool
    beside: Sequence[Feeds] = ()


def read_calibration(path: Path, kind: Kind, d_in: int, d_memory: int | None = None) -> Calibration:
    """Read tokens of the user's own; the first `MAX_TOKENS` of them, whole sequences, are used.

    `.npy`: float (n, d_in), or (sequences, length, d_in). `.npz`: `tokens` (n, d_in) and `seq_lens` (s,), sum n, and
    for a module with a memory `memory` (m, d_memory) and `memory_seq_lens` (s,), sum m.

    Raises:
        ExportError: names the file, what it holds and what was expected.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = {"tokens": loaded} if isinstance(loaded, np.ndarray) else {key: loaded[key] for key in loaded.files}
    except (OSError, EOFError, ValueError, zipfile.BadZipFile) as cause:
        raise ExportError(f"{path}: not a readable .npy or .npz file: {first_line(cause)}") from cause
    tokens, seq_lens = _packed(path, arrays, "tokens", "seq_lens", d_in, kind)
    memory = None if d_memory is None else _packed(path, arrays, "memory", "memory_seq_lens", d_memory, "sequence")
    if memory is not None and len(memory[1]) != len(seq_lens):
        raise ExportError(f"{path}: {len(memory[1])} memories for {len(seq_lens)} sequences, expected one for each")
    feeds = list(_runs(tokens, seq_lens, memory, kind))
    used = sum(len(run["tokens"]) for run in feeds)
    return Calibration(feeds, f"{path.name} (SHA-256 {file_sha256(path)[:16]}), {used:,} tokens", synthetic=False)


def synthetic_calibration(packed: Packed, *, seed: int, length: int = _SYNTHETIC_LENGTH) -> Calibration:
    """`_RUN_TOKENS` tokens of the adapter's sample of what the module meets, N(0, 1) where it has none.

    `length` is that of each sequence, a divisor of `_RUN_TOKENS`.
    """
    rng = np.random.default_rng((seed, 1))  # not the tokens that parity is measured on
    seq_lens = np.full(_RUN_TOKENS // length, length, np.int64)
    if packed.sample is None:
        tokens, what = rng.standard_normal((_RUN_TOKENS, packed.d_in), dtype=np.float32), "N(0, 1)"
    else:
        tokens, what = packed.sample(seq_lens.tolist(), rng), packed.sampled
    memory = None
    if packed.d_memory is not None:
        memory = rng.standard_normal((_RUN_TOKENS, packed.d_memory), dtype=np.float32), seq_lens
    feeds = list(_runs(tokens, seq_lens, memory, packed.kind))
    return Calibration(feeds, f"{SYNTHETIC}{what}, {len(tokens):,} tokens", synthetic=True)


def _packed(
    path: Path, arrays: Mapping[str, npt.NDArray[np.generic]], name: str, lengths: str, width: int, kind: Kind
) -> Sequences:
    """Rows (n, width) and the lengths of their sequences; single rows for position-wise modules."""
    if name not in arrays:
        raise ExportError(f"{path}: no array {name!r}, found {', '.join(sorted(arrays)) or 'none'}")
    array, seq_lens = arrays[name], arrays.get(lengths, np.empty(0))
    if array.ndim == 3:
        array, seq_lens = array.reshape(-1, array.shape[2]), np.full(array.shape[0], array.shape[1])
    elif kind == "position-wise":
        seq_lens = np.ones(len(array), np.int64)
    if array.ndim != 2 or array.shape[1] != width or array.dtype.kind != "f" or not len(array):
        raise ExportError(f"{path}: {name} is {array.dtype} {array.shape}, expected floats (n, {width}), n >= 1")
    if seq_lens.dtype.kind not in "iu" or seq_lens.ndim != 1 or not len(seq_lens):
        raise ExportError(
            f"{path}: where sequences begin is not stated: expected {name} (sequences, length, {width}), or integers "
            f"{lengths!r} (s,) beside it in an .npz"
        )
    with np.errstate(over="ignore"):  # what overflows is not finite
        rows = np.ascontiguousarray(array).astype(np.float32)
    if not np.isfinite(rows).all():
        raise ExportError(f"{path}: {name} holds NaN or infinite values (in float32)")
    whole = seq_lens.astype(np.int64)
    if whole.min() < 1 or whole.sum() != len(rows):
        raise ExportError(f"{path}: {lengths} sum to {whole.sum()} of {len(rows)} rows of {name}; each is at least 1")
    return rows, whole


def _runs(tokens: Float32, seq_lens: Int64, memory: Sequences | None, kind: Kind) -> Iterator[Feeds]:
    """Runs of whole sequences of about `_RUN_TOKENS`, until `MAX_TOKENS`; one sequence at least."""
    ends = np.cumsum(seq_lens)
    memory_ends = np.zeros(0, np.int64) if memory is None else np.cumsum(memory[1])
    start = first = memory_start = 0
    for index, end in enumerate(ends.tolist()):
        last = index + 1 == len(ends) or int(ends[index + 1]) > MAX_TOKENS
        if end - start >= _RUN_TOKENS or last:
            run: dict[str, npt.NDArray[np.generic]] = {"tokens": tokens[start:end]}
            if kind == "sequence":
                run["seq_lens"] = seq_lens[first : index + 1]
            if memory is not None:
                memory_end = int(memory_ends[index])
                run |= {"memory": memory[0][memory_start:memory_end], "memory_seq_lens": memory[1][first : index + 1]}
                memory_start = memory_end
            yield run
            start, first = end, index + 1
        if last:
            return


def spread(rows: Float32, count: int) -> Float32:
    """About `count` of the rows, taken evenly: sequences differ more than the tokens of one do."""
    return rows[:: max(1, len(rows) // count)]


class Activations:
    """Float rows (n, K) that reach each matmul, from runs of a float graph, one bounded batch of values at a time."""

    def __init__(
        self,
        model: ir.Model,
        widths: Mapping[str, int],
        feeds: Sequence[Feeds],
        path: Path,
        beside: Sequence[Feeds] = (),
    ) -> None:
        """Take `model`, which ONNX Runtime must be able to run, with some of its values as outputs.

        It is opened for each batch and not kept open: a session has all weights once more.

        Args:
            model: the float graph, lowered.
            widths: name of a value of the main graph -> its K, in the order of use or its reverse.
            feeds: inputs of each run.
            path: the file that the graph is written to for that long.
            beside: inputs of further runs, whose rows are given apart.
        """
        model = model.clone()
        values = {value.name: value for node in model.graph for value in node.outputs}
        values |= {value.name: value for value in model.graph.inputs}
        self._taps: dict[str, str] = {}
        for index, name in enumerate(widths):  # a graph input is no output as it is
            tap = ir.node("Identity", [values[name]], name=f"tap.{index}")
            tap.outputs[0].name = self._taps[name] = f"tap.{index}"
            tap.outputs[0].dtype = ir.DataType.FLOAT
            model.graph.append(tap)
            model.graph.outputs.append(tap.outputs[0])
        self._feeds = {False: feeds, True: beside}
        self._batch_of = _batches(widths, sum(len(run["tokens"]) for run in (*feeds, *beside)))
        self._kept: dict[tuple[str, bool], Float32] = {}
        self._model, self._path = model, path

    def has(self, name: str) -> bool:
        """Whether this value was asked for."""
        return name in self._taps

    def rows(self, name: str) -> Float32:
        """The rows of one value, (n, K); n is 0 where no calibration token came by."""
        return self._fetch(name, beside=False)

    def rows_beside(self, name: str) -> Float32 | None:
        """The same of the tokens beside; None if there are none."""
        return self._fetch(name, beside=True) if self._feeds[True] else None

    def _fetch(self, name: str, *, beside: bool) -> Float32:
        if (name, beside) not in self._kept:
            names = [other for other, batch in self._batch_of.items() if batch == self._batch_of[name]]
            self._kept.clear()
            session = self._open()
            for which, inputs in self._feeds.items():
                runs = [session.run([self._taps[name] for name in names], feeds) for feeds in inputs]
                for index, other in enumerate(names if runs else ()):
                    rows = [run[index].reshape(-1, run[index].shape[-1]) for run in runs]
                    self._kept[other, which] = np.concatenate(rows)
        return self._kept[name, beside]

    def _open(self) -> ort.InferenceSession:
        try:
            ir.save(self._model, self._path)
            return open_session(self._path, "cpu", threads=cpu_quota())
        finally:
            self._path.unlink(missing_ok=True)


def _batches(widths: Mapping[str, int], rows: int) -> dict[str, int]:
    """Value -> number of the batch it is fetched in; a batch is a stretch of values that may be kept together."""
    batches: dict[str, int] = {}
    batch = size = 0
    for name, width in widths.items():
        bytes_of_one = 4 * rows * width
        if size and size + bytes_of_one > _KEPT_BYTES:
            batch, size = batch + 1, 0
        batches[name] = batch
        size += bytes_of_one
    return batches
