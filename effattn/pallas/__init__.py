"""Kernels in Pallas, beneath the same doors as the cores in XLA.

Each file is one core's program for one kind of device, and documents what it keeps where. Nothing
here is imported before it is asked for.
"""
