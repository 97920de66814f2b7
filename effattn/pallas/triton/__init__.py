"""Kernels for NVIDIA GPUs from Ampere on, lowered by Triton."""
