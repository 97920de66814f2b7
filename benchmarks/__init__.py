"""Measurements of effattn beside what JAX, Tokamax and PyTorch ship."""
