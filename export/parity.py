"""Parity of an ONNX file with its torch module, whose float64 answers are the reference.

One layer of the module is float64 at a time. It opens no file and writes none: sessions and arrays only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import onnxruntime as ort
import torch

from export.errors import ExportError, NoRoutingMargin, ProofError, first_line
from export.experts import recorded_routing
from export.packed import Packed
from export.precision import float64_layer_by_layer
from export.reference import Case
from export.relative_error import Float64, relative_error, sqnr_db
from export.routed import with_margin
from service.manifest import Parity, Routing
from service.memory import Memory
from service.session import run_packed

TOKENS: Final = (1, 2, 7, 64, 257)
RAGGED: Final = ((1, 1), (3, 7), (5, 1, 9, 2), (1,) * 16, (64, 1, 17, 40))

ONE_LAYER: Final = 2e-6
SIX_LAYERS: Final = 1e-5
LEAST_WITH_MARGIN: Final = 0.5  # of the tokens; less would prove little


def fp32_bar(depth: int) -> float:
    """Largest relative error allowed in float32: 2e-6 for one FFN or block, 1e-5 for six, linear between and beyond."""
    return ONE_LAYER + (SIX_LAYERS - ONE_LAYER) * (max(depth, 1) - 1) / 5


def reference_cases(packed: Packed, *, seed: int) -> list[Case]:
    """Run the module in float64 on tokens of every shape in `TOKENS`, and of `RAGGED` for sequences.

    The tokens are the adapter's sample of what the module meets, N(0, 1) where it has none; a memory is N(0, 1), and
    its lengths are as ragged as those of the sequences, in another order.

    Raises:
        ExportError: the module fails, or answers with something that is not finite.
    """
    rng = np.random.default_rng(seed)
    shapes: list[tuple[int, ...]] = [(n,) for n in TOKENS]
    if packed.kind == "sequence":
        shapes += RAGGED
    cases = []
    for seq_lens in shapes:
        if packed.sample is None:
            tokens = rng.standard_normal((sum(seq_lens), packed.d_in), dtype=np.float32)
        else:
            tokens = packed.sample(seq_lens, rng)
        inputs = [torch.from_numpy(tokens).double()]
        if packed.kind == "sequence":
            inputs.append(torch.tensor(seq_lens))
        memory = None
        if packed.d_memory is not None:
            memory = _memory(seq_lens, packed.d_memory, rng)
            inputs += [torch.from_numpy(memory.rows).double(), torch.from_numpy(memory.seq_lens)]
        try:
            with float64_layer_by_layer(packed.layers), recorded_routing(packed.module) as routed:
                reference: Float64 = packed.module(*inputs).numpy()
        except Exception as cause:
            raise ExportError(
                f"the module failed on {list(seq_lens)} tokens in float64: {first_line(cause)}"
            ) from cause
        if not np.isfinite(reference).all():
            raise ExportError(f"the module's answer to {list(seq_lens)} finite tokens is not finite")
        cases.append(Case(tokens, seq_lens, reference, memory, tuple(routed)))
    return cases


def _memory(seq_lens: Sequence[int], d_memory: int, rng: np.random.Generator) -> Memory:
    lens = rng.permutation(np.maximum(1, 3 * np.array(seq_lens) // 2 - 2))
    return Memory(rng.standard_normal((lens.sum(), d_memory), dtype=np.float32), np.cumsum(lens))


def measure(session: ort.InferenceSession, cases: Sequence[Case], routing: Sequence[Routing] = ()) -> list[Parity]:
    """Compare `session` with the references.

    With `routing`, over the tokens that its noise does not send to other experts; a case without any has no row.

    Raises:
        ProofError: an output has the wrong shape or is not finite.
        NoRoutingMargin: most tokens have no routing margin.
    """
    counted = [with_margin(case.routed, routing, len(case.tokens)) for case in cases]
    share = sum(int(rows.sum()) for rows in counted) / sum(map(len, counted))
    if share < LEAST_WITH_MARGIN:
        raise NoRoutingMargin(
            f"only {share:.0%} of the tokens have a margin that the noise at the routers ({_noise(routing)}) cannot "
            "flip"
        )
    takes_seq_lens = "seq_lens" in {value.name for value in session.get_inputs()}
    rows = []
    for case, kept in zip(cases, counted, strict=True):
        seq_lens = np.array(case.seq_lens, dtype=np.int64) if takes_seq_lens else None
        try:
            out = run_packed(session, case.tokens, seq_lens, case.memory)
        except Exception as cause:
            raise ProofError(f"ONNX Runtime fails at {list(case.seq_lens)} tokens: {first_line(cause)}") from cause
        if out.shape != case.reference.shape or out.dtype != np.float32:
            raise ProofError(
                f"out is {out.dtype} {out.shape} at {list(case.seq_lens)} tokens, expected float32 "
                f"{case.reference.shape}"
            )
        if not kept.any():
            continue
        error = relative_error(out[kept], case.reference[kept])
        if not math.isfinite(error):
            raise ProofError(f"out is not finite, or not zero where torch gives zero, at {list(case.seq_lens)} tokens")
        memory_seq_lens = None if case.memory is None else case.memory.seq_lens.tolist()
        rows.append(
            Parity(
                seq_lens=list(case.seq_lens),
                memory_seq_lens=memory_seq_lens,
                relative_error=error,
                sqnr_db=sqnr_db(error),
            )
        )
    return rows


def _noise(routing: Sequence[Routing]) -> str:
    return ", ".join(f"{router.noise:.1e}" for router in routing)


def check(parity: Sequence[Parity], depth: int, min_sqnr_db: float | None) -> None:
    """Hold `parity` against `min_sqnr_db` or, without it, against float32's bar for `depth`.

    Raises:
        ProofError: names the worst shape, what was measured and what is allowed.
    """
    worst = max(parity, key=lambda row: row.relative_error)
    if min_sqnr_db is None and worst.relative_error > fp32_bar(depth):
        raise ProofError(
            f"relative error {worst.relative_error:.2e} against torch in float64 at sequence lengths "
            f"{worst.seq_lens}, allowed {fp32_bar(depth):.2e} for a depth of {depth}"
        )
    if min_sqnr_db is not None and worst.sqnr_db < min_sqnr_db:
        raise ProofError(
            f"SQNR {worst.sqnr_db:.1f} dB against torch in float64 at sequence lengths {worst.seq_lens}, "
            f"required {min_sqnr_db:.0f} dB: these weights do not suit so few bits; --min-sqnr {min_sqnr_db:.0f} makes "
            "the worst matmuls more exact, --precision fp32 all"
        )
