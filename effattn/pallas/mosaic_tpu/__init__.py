"""Kernels for TPUs, lowered by Mosaic TPU."""
