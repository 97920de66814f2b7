"""Kernels for Hopper GPUs, in Mosaic GPU."""
