"""Cores: the few computations that most mechanisms reduce to, each with its derivatives.

The code that computes them is in `effattn.xla` for any device, and in `effattn.llvm` and
`effattn.pallas` for CPUs, GPUs and TPUs.

- The cores are `block_attention`, `linear_recurrence`, `diagonal_recurrence` and
  `cell_recurrence`.
- Shared checks and calls: `attention`, `recurrence`, `feature_attention`, `token_mixing` and
  `by_head`.
- Documents in packed rows: `documents`, and files named `document_...` and `packed_...`.
- Sequences that are divided among devices: `sequence_parts`, `passed_states`.
- Algorithms of one mechanism or a few: `sorted_chunks` and `sorted_runs` (LSH), `clusters`
  (routing), `chosen_blocks` and `chosen_keys` (MoBA, indexed attention, learned blocks),
  `native_sparse`, `hierarchy`, `relative_segments` (Transformer-XL), `compressive_memory`,
  `chunk_attention` (Mega), `diagonal_spaces` (S4), `mesa`, `experts`, and small sums and maps.
"""
