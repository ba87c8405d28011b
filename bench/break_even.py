"""When the wire costs more than the arithmetic: pure formulas on bytes, FLOPs and rates. It measures nothing.

A token of width d goes in and comes out as float32, 8 d bytes; an FFN does 2 multiply-adds for each of its 2 d d_ff
weights, 4 d d_ff FLOPs. Both grow with d, so the width at which they cost the same does not depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FLOAT32_BITS: Final = 32
PLAIN, GATED = 2, 3  # matrices of an FFN
LINKS_GBIT_S: Final = (1.0, 10.0, 100.0)


def wire_bits(d_in: int, d_out: int) -> int:
    """Bits of a token on the wire as float32, both ways together; heads and framing apart."""
    return FLOAT32_BITS * (d_in + d_out)


def ffn_flops(d: int, d_ff: int, matrices: int = PLAIN) -> int:
    """FLOPs of a token through an FFN of `matrices` d x d_ff, 2 a multiply-add."""
    return 2 * matrices * d * d_ff


def break_even_d_ff(gflop_s: float, gbit_s: float, matrices: int = PLAIN) -> float:
    """The d_ff at which a token takes as long on a wire of `gbit_s` as in a processor that does `gflop_s`.

    2 m d d_ff / G = 64 d / B, so d_ff = 32 G / (m B): below it the wire is the limit. Raises ValueError unless both
    rates are positive.
    """
    if min(gflop_s, gbit_s) <= 0:
        raise ValueError(f"rates must be positive, found {gflop_s} GFLOP/s and {gbit_s} Gbit/s")
    return 2 * FLOAT32_BITS * gflop_s / (2 * matrices * gbit_s)


def hidden_units_of_stack(d: int, d_ff: int, layers: int, matrices: int = PLAIN) -> float:
    """The d_ff of one FFN with the weights of a stack of blocks, whose tokens cross the wire once.

    A block's attention adds 4 d x d weights (scores apart), as much as 4 d / m hidden units.
    """
    return layers * (d_ff + 4 * d / matrices)


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor time of a token, in microseconds: of carrying it through the service, and of computing on it."""

    carry_us: float
    compute_us: float

    @property
    def share_of_compute(self) -> float:
        """What is left for the arithmetic when both use the same cores."""
        return self.compute_us / (self.carry_us + self.compute_us)

    def carried_gbit_s(self, d_in: int, d_out: int) -> float:
        """Gbit/s that one core carries while it computes nothing."""
        return wire_bits(d_in, d_out) / self.carry_us / 1e3

    def gflop_s(self, flops: int) -> float:
        """GFLOP/s of one core, for a token of `flops`."""
        return flops / self.compute_us / 1e3
