"""Bodies of rotary positions: once over the whole window, never sequence by sequence."""

from __future__ import annotations

from export.lowering.registry import PROVIDERS, Body, register_body

SEQUENCE_POSITIONS = "SequencePositions"
ROTARY_EMBEDDING = "RotaryEmbedding"

# Rows count up by one, and fall back to 0 where a sequence starts. Integers: exact. Layers that share a window share
# it too: ONNX Runtime merges equal operators.
_POSITIONS = """
(tokens, seq_lens) => (positions)
{
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  minus_one = Constant <value_ints = [-1]> ()
  axis = Constant <value_int = 0> ()
  rows = Shape <start = 0, end = 1> (tokens)
  ones = Expand (one, rows)
  earlier = Slice (seq_lens, zero, minus_one)
  starts = CumSum (earlier, axis)
  falls = Sub (one, earlier)
  steps = ScatterElements (ones, starts, falls)
  numbered = CumSum (steps, axis)
  positions = Sub (numbered, one)
}
"""

# Every row is a batch of one token: as one long sequence it would have to be shorter than the table. A position beyond
# the table is an error of the operator, so that the service must refuse such a sequence before its window.
_ROTARY = """
<num_heads> (rows, positions, cos, sin) => (turned)
{
  axis = Constant <value_ints = [1]> ()
  batch = Unsqueeze (rows, axis)
  batch_positions = Unsqueeze (positions, axis)
  turned_batch = com.microsoft.RotaryEmbedding <num_heads: int = @num_heads> (batch, batch_positions, cos, sin)
  turned = Squeeze (turned_batch, axis)
}
"""


def register() -> None:
    """Make the bodies known."""
    for provider in PROVIDERS:
        register_body(SEQUENCE_POSITIONS, provider, Body(SEQUENCE_POSITIONS, _POSITIONS))
        register_body(ROTARY_EMBEDDING, provider, Body(ROTARY_EMBEDDING, _ROTARY))
