"""Float weight matmuls -> integer ones: the forms, how weights are rounded, and what makes activations easy to round.

One direction: `forms` and `rounding` are arithmetic, `calibration` runs the float graph, `folding` and `smoothing`
change it without changing what it computes, and `export.quantize` puts the integer matmuls in.
"""
