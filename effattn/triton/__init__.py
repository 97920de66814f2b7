"""Kernels in the Triton language for NVIDIA GPUs (Ampere and later), called by jax-triton.

They have the same interface as the implementations in XLA. Pallas lowers to Triton too, but JAX has
deprecated that; these kernels need jax-triton instead (`pip install effattn[gpu]`). They are
imported only when a kernel is first used.

A file of kernels has functions of pointers, and a plan: the sizes, known when a kernel is compiled.
The file beside it computes the plan and the grid, and calls the kernels. On machines without a GPU
`effattn.triton.interpreter` runs the kernels.
"""
