"""The details of a bundle: what its layers see and lose, what fused, how fast it is; measured on the files."""
