"""Costs of attention against length: time, operations and memory, measured and in theory."""
