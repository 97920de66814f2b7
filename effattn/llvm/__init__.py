"""Kernels for CPUs: LLVM's intermediate code, written by `llvmlite` and compiled when first used.

XLA's products and its passes over logits are parallel operations of their own, each of which waits
for all threads. Here a thread has a task of its own, from logits to outputs, whose arrays stay in
its nearest memory.
"""

from effattn.llvm import compiled

# A program that holds such a kernel may be loaded before any call is traced here.
compiled.register()
