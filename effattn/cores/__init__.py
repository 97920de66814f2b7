"""Cores: the few computations that most mechanisms reduce to, each with its derivatives.

The code that computes them is in `effattn.xla` for any device, and in `effattn.llvm` and
`effattn.pallas` for CPUs, GPUs and TPUs. The other files are algorithms of single
mechanisms: sorted chunks (LSH), clusters (routing), chosen blocks (MoBA, native sparse and
indexed attention), pooling, segment means and running maxima.
"""
