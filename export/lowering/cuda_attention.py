"""Bodies of attention for CUDA, which has no SequenceMap: packed where a kernel takes it, elsewhere padded inside.

com.microsoft.PackedMultiHeadAttention does bidirectional self-attention without bias; causal, grouped, windowed, biased
and cross-attention are padded to the longest sequence for the attention alone. Padding is zeros, never another
sequence's rows: NaN there would come through a weight of 0. Types follow the inputs.
"""

from __future__ import annotations

from typing import Final

import onnx_ir as ir

from export.lowering.attention import VARLEN_ATTENTION
from export.lowering.cross_attention import VARLEN_CROSS_ATTENTION
from export.lowering.registry import Body, register_body

# Where sequences are: {p}valid (S, L) bool and {p}places (S, L), row 0 where there is none.
_LAYOUT: Final = """
  {p}first = Constant <value_int = 0> ()
  {p}step = Constant <value_int = 1> ()
  {p}axis_0 = Constant <value_ints = [0]> ()
  {p}axis_1 = Constant <value_ints = [1]> ()
  {p}longest = ReduceMax <keepdims = 0> ({lens})
  {p}positions = Range ({p}first, {p}longest, {p}step)
  {p}row = Unsqueeze ({p}positions, {p}axis_0)
  {p}lengths = Unsqueeze ({lens}, {p}axis_1)
  {p}valid = Less ({p}row, {p}lengths)
  {p}ends = CumSum ({lens}, {p}first)
  {p}starts = Sub ({p}ends, {lens})
  {p}start = Unsqueeze ({p}starts, {p}axis_1)
  {p}all_places = Add ({p}start, {p}row)
  {p}places = Where ({p}valid, {p}all_places, {p}first)
  {p}lengths_32 = Cast <to = 6> ({lens})
"""

_PADDED: Final = """
  {x}_axis = Constant <value_ints = [2]> ()
  {x}_valid = Unsqueeze ({p}valid, {x}_axis)
  {x}_zero = Constant <value = float {{0}}> ()
  {x}_nothing = CastLike ({x}_zero, {x})
  {x}_gathered = Gather <axis = 0> ({x}, {p}places)
  {x}_batch = Where ({x}_valid, {x}_gathered, {x}_nothing)
"""

_REPEAT: Final = """
  {x}_split = Constant <value_ints = [0, 0, {num_kv_heads}, 1, {head_size}]> ()
  {x}_times = Constant <value_ints = [1, 1, 1, {times}, 1]> ()
  {x}_merged = Constant <value_ints = [0, 0, {width}]> ()
  {x}_heads = Reshape ({x}_batch, {x}_split)
  {x}_repeated = Expand ({x}_heads, {x}_times)
  {x}_all = Reshape ({x}_repeated, {x}_merged)
"""

_DISTANCES: Final = """
  column = Unsqueeze (positions, axis_1)
  distances = Sub (row, column)
"""

_BIAS: Final = """
  highest = Constant <value_int = {farthest}> ()
  lowest = Constant <value_int = -{farthest}> ()
  near = Clip (distances, lowest, highest)
  bias_places = Add (near, highest)
  bias_heads = Gather <axis = 1> (bias, bias_places)
  bias_batch = Unsqueeze (bias_heads, axis_0)
"""

_WINDOW: Final = """
  before = Constant <value_int = -{window}> ()
  outside = LessOrEqual (distances, before)
  hidden = Constant <value = float {{-inf}}> ()
  seen = Constant <value = float {{0}}> ()
  window_rows_32 = Where (outside, hidden, seen)
  window_rows = CastLike (window_rows_32, q)
  two_axes = Constant <value_ints = [0, 1]> ()
  window_batch = Unsqueeze (window_rows, two_axes)
"""

_ATTEND: Final = """
  attended_batch = com.microsoft.MultiHeadAttention <num_heads: int = @num_heads{causal}, scale: float = @scale>
    (q_batch, {k}, {v}, , {p}lengths_32{bias})
  attended_rows = Flatten <axis = 2> (attended_batch)
  all_rows = Constant <value_ints = [-1]> ()
  kept = Reshape (valid, all_rows)
  attended = Compress <axis = 0> (attended_rows, kept)
"""

# As RemovePadding numbers them: the places of tokens in the padded batch, then those of the padding.
PACKED_LAYOUT: Final = """
  all_rows = Constant <value_ints = [-1]> ()
  flat = Reshape (valid, all_rows)
  padding = Not (flat)
  of_tokens = NonZero (flat)
  of_padding = NonZero (padding)
  numbered = Concat <axis = 1> (of_tokens, of_padding)
  batch = Shape (valid)
  token_offset_64 = Reshape (numbered, batch)
  token_offset = Cast <to = 6> (token_offset_64)
  none = Constant <value_ints = [0]> ()
  cumulative_64 = Concat <axis = 0> (none, ends)
  cumulative = Cast <to = 6> (cumulative_64)
"""

_PACKED: Final = """
  attended = com.microsoft.PackedMultiHeadAttention <num_heads: int = @num_heads, scale: float = @scale>
    (q, k, v, , token_offset, cumulative)
"""


def layout(lens: str, prefix: str = "") -> str:
    """The operators that say where sequences of `lens` are."""
    return _LAYOUT.format(p=prefix, lens=lens)


def varlen_attention_cuda(node: ir.Node) -> Body:
    """The body for one node; see `export.blocks.varlen_attention` for its inputs and attributes."""
    num_heads, num_kv_heads, causal, window = (
        node.attributes.get_int(name) for name in ("num_heads", "num_kv_heads", "causal", "window")
    )
    if causal or window or num_kv_heads != num_heads or len(node.inputs) > 4:
        return padded_attention(node)
    text = (
        "<num_heads, scale> (q, k, v, seq_lens) => (attended)\n{" + layout("seq_lens") + PACKED_LAYOUT + _PACKED + "}"
    )
    return Body(f"Packed{VARLEN_ATTENTION}", text)


def padded_attention(node: ir.Node) -> Body:
    """The same, always padded: what the packed kernel is compared with, and what the CPU provider can run too."""
    num_heads, num_kv_heads, head_size, window = (
        node.attributes.get_int(name) for name in ("num_heads", "num_kv_heads", "head_size", "window")
    )
    biased = len(node.inputs) > 4
    name, k, v, scores_bias = f"Padded{VARLEN_ATTENTION}", "k_batch", "v_batch", ""
    text = layout("seq_lens") + "".join(_PADDED.format(x=x, p="") for x in "qkv")
    if num_kv_heads != num_heads:
        times, width = num_heads // num_kv_heads, num_heads * head_size
        name = f"{name}_heads_{num_kv_heads}x{times}x{head_size}"
        for x in "kv":
            text += _REPEAT.format(x=x, num_kv_heads=num_kv_heads, times=times, head_size=head_size, width=width)
        k, v = "k_all", "v_all"
    if biased or window:
        text += _DISTANCES
    if biased:
        bias = node.inputs[4]
        assert bias is not None
        assert bias.shape is not None
        farthest = int(bias.shape[1]) // 2  # type: ignore[arg-type]
        name = f"{name}_bias_{farthest}"
        text += _BIAS.format(farthest=farthest)
        scores_bias = "bias_batch"
    if window:
        name = f"{name}_window_{window}"
        text += _WINDOW.format(window=window)
        if biased:
            text += "  masked_bias = Add (bias_batch, window_batch)\n"
        scores_bias = "masked_bias" if biased else "window_batch"
    scores_bias = f", {scores_bias}" if scores_bias else ""
    text += _ATTEND.format(k=k, v=v, p="", causal=", unidirectional: int = @causal", bias=scores_bias)
    inputs = "q, k, v, seq_lens, bias" if biased else "q, k, v, seq_lens"
    return Body(name, f"<num_heads, causal, scale> ({inputs}) => (attended)\n{{{text}}}")


def _cross_attention() -> Body:
    text = layout("seq_lens") + layout("memory_seq_lens", "m_") + _PADDED.format(x="q", p="")
    text += "".join(_PADDED.format(x=x, p="m_") for x in "kv")
    text += _ATTEND.format(k="k_batch", v="v_batch", p="m_", causal="", bias="")
    return Body(
        f"Padded{VARLEN_CROSS_ATTENTION}",
        f"<num_heads, scale> (q, k, v, seq_lens, memory_seq_lens) => (attended)\n{{{text}}}",
    )


def register() -> None:
    """Make the bodies known."""
    register_body(VARLEN_ATTENTION, "cuda", varlen_attention_cuda)
    register_body(VARLEN_CROSS_ATTENTION, "cuda", _cross_attention())
