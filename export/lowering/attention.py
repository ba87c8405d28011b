"""Bodies of attention. CPU: sequence by sequence, the only form that is bit for bit the same alone and beside others.

Padded and masked forms differ by about 1e-6, and are slower on skewed lengths.
"""

from __future__ import annotations

from typing import Final

from export.lowering.registry import Body, register_body

VARLEN_ATTENTION: Final = "VarlenAttention"

# q, k, v and the result are float32 (N, num_heads * head_size); seq_lens is int64 (S,), entries >= 1, sum N.
# SequenceMap fails on zero sequences and on an empty one beside others: the service drops those before the window.
# A NaN in a later token reaches the earlier ones of its own sequence, causal or not, as in torch: NaN + -inf is NaN.
_VARLEN_ATTENTION_CPU: Final = """
<num_heads, causal, scale> (q, k, v, seq_lens) => (attended)
{
  axis = Constant <value_ints = [0]> ()
  q_sequences = SplitToSequence <axis = 0> (q, seq_lens)
  k_sequences = SplitToSequence <axis = 0> (k, seq_lens)
  v_sequences = SplitToSequence <axis = 0> (v, seq_lens)
  attended_sequences = SequenceMap <
    body = one_sequence (float[tokens, d] q_rows, float[tokens, d] k_rows, float[tokens, d] v_rows)
      => (float[tokens, d] attended_rows)
    {
      q_batch = Unsqueeze (q_rows, axis)
      k_batch = Unsqueeze (k_rows, axis)
      v_batch = Unsqueeze (v_rows, axis)
      attended_batch = com.microsoft.MultiHeadAttention
        <num_heads: int = @num_heads, unidirectional: int = @causal, scale: float = @scale> (q_batch, k_batch, v_batch)
      attended_rows = Squeeze (attended_batch, axis)
    }
  > (q_sequences, k_sequences, v_sequences)
  attended = ConcatFromSequence <axis = 0> (attended_sequences)
}
"""


def register() -> None:
    """Make the bodies known."""
    register_body(VARLEN_ATTENTION, "cpu", Body(VARLEN_ATTENTION, _VARLEN_ATTENTION_CPU))
