"""`make demo`: the main job on real weights and real text, with every figure measured as it is printed."""
