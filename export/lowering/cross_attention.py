"""Bodies of cross-attention. CPU: sequence by sequence, each with its own memory, for the reasons of `attention`."""

from __future__ import annotations

from export.lowering.registry import Body, register_body

VARLEN_CROSS_ATTENTION = "VarlenCrossAttention"

# A NaN in a memory reaches every token of its own sequence, as in torch: it is in the softmax of each.
_BODY = """
<num_heads, scale> (q, k, v, seq_lens, memory_seq_lens) => (attended)
{
  axis = Constant <value_ints = [0]> ()
  q_sequences = SplitToSequence <axis = 0> (q, seq_lens)
  k_sequences = SplitToSequence <axis = 0> (k, memory_seq_lens)
  v_sequences = SplitToSequence <axis = 0> (v, memory_seq_lens)
  attended_sequences = SequenceMap <
    body = one_sequence (float[tokens, d] q_rows, float[memory, d] k_rows, float[memory, d] v_rows)
      => (float[tokens, d] attended_rows)
    {
      q_batch = Unsqueeze (q_rows, axis)
      k_batch = Unsqueeze (k_rows, axis)
      v_batch = Unsqueeze (v_rows, axis)
      attended_batch = com.microsoft.MultiHeadAttention <num_heads: int = @num_heads, scale: float = @scale>
        (q_batch, k_batch, v_batch)
      attended_rows = Squeeze (attended_batch, axis)
    }
  > (q_sequences, k_sequences, v_sequences)
  attended = ConcatFromSequence <axis = 0> (attended_sequences)
}
"""


def register() -> None:
    """Make the body known."""
    register_body(VARLEN_CROSS_ATTENTION, "cpu", Body(VARLEN_CROSS_ATTENTION, _BODY))
