"""Runnable experiments: short scripts over the pieces in `experiments.harness`."""
