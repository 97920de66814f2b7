"""Array helpers for all mechanisms: checks, dtypes, packing, positions, mesh axes, gathers."""
