"""Benchmarks of effattn beside JAX, Tokamax, PyTorch and jax-linear-attention."""
