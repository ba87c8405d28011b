"""Rotary position embedding (Su et al. 2021) that starts again in each packed sequence.

In an export the positions and the rotation are the intent nodes `tokenslab::SequencePositions` and
`tokenslab::RotaryEmbedding`; everywhere else they are plain torch, in whatever dtype the tokens have.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

SEQUENCE_POSITIONS: Final = "tokenslab::SequencePositions"
ROTARY_EMBEDDING: Final = "tokenslab::RotaryEmbedding"


def sequence_positions(tokens: Tensor, seq_lens: Tensor) -> Tensor:
    """Number the rows of each sequence from 0: (N, ...) and (S,) with sum N to (N,) int64."""
    if torch.compiler.is_exporting():
        node: Tensor = torch.onnx.ops.symbolic(
            SEQUENCE_POSITIONS, (tokens, seq_lens), dtype=torch.int64, shape=tokens.shape[:1], version=1
        )
        return node
    return torch.cat([torch.arange(length) for length in seq_lens.tolist()])


def longest_sequence(module: nn.Module) -> int | None:
    """The longest sequence that every table of positions in `module` holds; None where there is no table."""
    return min((part.max_positions for part in module.modules() if isinstance(part, Rotary)), default=None)


class Rotary(nn.Module):
    """Turns each pair (i, i + head_size / 2) of a head by position x inverse frequency i: the form of Llama.

    An exported file looks cosines and sines up in a table: ONNX Runtime's own give other last bits at another place of
    the tensor. The table is rounded from float64; transformers computes the angles in float32, which at position p is
    off by up to p x 6e-8 radians.
    """

    def __init__(self, inverse_frequencies: Tensor, *, max_positions: int, scaling: float = 1.0) -> None:
        """Make the table.

        Args:
            inverse_frequencies: (head_size / 2,), radians per position.
            max_positions: rows of the table; an exported file refuses longer sequences.
            scaling: multiplies cosines and sines.
        """
        super().__init__()
        self.max_positions = max_positions
        self.scaling = scaling
        self.inverse_frequencies = nn.Buffer(inverse_frequencies.detach().float(), persistent=False)
        cos, sin = self._waves(torch.arange(max_positions), torch.float64)
        self.cos_table = nn.Buffer(cos.float(), persistent=False)
        self.sin_table = nn.Buffer(sin.float(), persistent=False)

    @property
    def head_size(self) -> int:
        return 2 * len(self.inverse_frequencies)

    def forward(self, rows: Tensor, seq_lens: Tensor) -> Tensor:
        """Rotate every head of (N, heads * head_size) to its row's position in its sequence."""
        positions = sequence_positions(rows, seq_lens)
        if torch.compiler.is_exporting():
            node: Tensor = torch.onnx.ops.symbolic(
                ROTARY_EMBEDDING,
                (rows, positions, self.cos_table, self.sin_table),
                {"num_heads": rows.shape[1] // self.head_size},
                dtype=rows.dtype,
                shape=rows.shape,
                version=1,
            )
            return node
        cos, sin = (wave.unsqueeze(1) for wave in self._waves(positions, rows.dtype))
        first, second = rows.reshape(len(rows), -1, self.head_size).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(1)

    def _waves(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions.to(dtype).unsqueeze(1) * self.inverse_frequencies.to(dtype)
        return angles.cos() * self.scaling, angles.sin() * self.scaling
