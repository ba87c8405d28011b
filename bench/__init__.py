"""Load generation, the in-process limit, and reports."""
