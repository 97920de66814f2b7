"""Shared parts of the experiments."""
