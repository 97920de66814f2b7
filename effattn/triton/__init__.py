"""Kernels in the Triton language for NVIDIA GPUs (Ampere and later), called by jax-triton.

They have the same interface as the implementations in XLA. Pallas lowers to Triton too, but JAX has
deprecated that; these kernels need jax-triton instead (`pip install effattn[gpu]`, Python 3.12 or
later). They are imported only when a kernel is first used.

The files `*_kernels.py` have the kernels. The files beside them compute the plan of a call, which
are its sizes and options, known when a kernel is compiled, and the grid, and call the kernels. On
machines without a GPU `effattn.triton.interpreter` runs the kernels.
"""
