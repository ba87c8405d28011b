"""The float64 proof that each row of a module's answer depends on that row of the input alone.

float64 matmuls in torch are not row-invariant to the last bit (4e-15 measured), so the bar is 1e-12 relative. Bit for
bit is checked later, on the ONNX file.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from export.errors import ProofError

BAR: Final = 1e-12
_SIZES: Final = (2, 3, 17, 64)
_ROWS: Final = 8  # of each size are followed alone and among replaced neighbours
_LOUD: Final = 30.0  # replaced neighbours are larger than the row, as outlier tokens are


def prove_rows_independent(module: nn.Module, d: int, seed: int) -> float:
    """Prove it for `module(tokens)`, float64 (N, d), by permutation, rows alone and neighbours replaced.

    Returns:
        The largest difference of a row, relative to the larger of its norm and the rows' root mean square.

    Raises:
        ProofError: the answer is random or not finite, or which token changed when which neighbour changed.
    """
    generator = torch.Generator().manual_seed(seed)
    worst = 0.0
    with torch.no_grad():
        for n in _SIZES:
            tokens = torch.randn(n, d, generator=generator, dtype=torch.float64)
            whole: Tensor = module(tokens)
            if not bool(whole.isfinite().all()):
                raise ProofError(f"its answer to {n} finite tokens is not finite")
            if not torch.equal(whole, module(tokens)):
                raise ProofError("two runs on the same tokens differ: it is random, or it keeps state, in eval mode")
            scale = whole.norm(dim=1).clamp_min(float(whole.norm() / n**0.5)).clamp_min(torch.finfo(whole.dtype).tiny)
            kept = torch.randperm(n, generator=generator)[:_ROWS].tolist()

            for row in kept:
                others = torch.randn(n, d, generator=generator, dtype=torch.float64) * _LOUD
                others[row] = tokens[row]
                drift = float((module(others)[row] - whole[row]).norm() / scale[row])
                if not drift <= BAR:
                    raise ProofError(_blame(module, tokens, others, whole, row))
                alone = float((module(tokens[row : row + 1])[0] - whole[row]).norm() / scale[row])
                if not alone <= BAR:
                    raise ProofError(f"token {row} of {n} differs by {alone:.1e} (relative) when it is alone")
                worst = max(worst, drift, alone)

            order = torch.randperm(n, generator=generator)
            moved = (module(tokens[order]) - whole[order]).norm(dim=1) / scale[order]
            if not float(moved.max()) <= BAR:
                at = int(moved.argmax())
                raise ProofError(
                    f"token {int(order[at])} of {n} differs by {float(moved[at]):.1e} (relative) at position {at}: "
                    "the result depends on the position"
                )
            worst = max(worst, float(moved.max()))
    return worst


def _blame(module: nn.Module, tokens: Tensor, others: Tensor, whole: Tensor, row: int) -> str:
    n = len(tokens)
    for neighbour in range(n):
        if neighbour == row:
            continue
        changed = tokens.clone()
        changed[neighbour] = others[neighbour]
        difference = float((module(changed)[row] - whole[row]).abs().max())
        relative = difference / max(float(whole[row].abs().max()), torch.finfo(whole.dtype).tiny)
        if not relative <= BAR:
            return (
                f"token {row} of {n} changed by {difference:.2g} ({relative:.1e} relative) when token {neighbour} did"
            )
    return f"token {row} of {n} changed when all its neighbours did"
