"""Kernels for NVIDIA GPUs (Ampere and later), lowered by Triton."""
