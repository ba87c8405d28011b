"""torch -> bundle. The only package that may import torch; importing it alone loads no torch."""
