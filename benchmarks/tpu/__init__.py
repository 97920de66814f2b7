"""Benchmarks of the kernels for TPUs."""
