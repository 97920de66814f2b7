"""Pallas kernels of the cores, with the same interface as the implementations in XLA.

A file holds the kernels of one core for one kind of device. Its docstring says which arrays lie in
which memory, and why. These modules are imported only when a kernel is first used.
"""
