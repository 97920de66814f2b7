"""Measurements of effattn's kernels beside those of others, on one CUDA GPU."""
