"""Kernels for Hopper GPUs, lowered by Mosaic GPU."""
