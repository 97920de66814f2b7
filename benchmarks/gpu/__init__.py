"""Benchmarks of effattn's kernels beside other libraries, on one CUDA GPU."""
