"""Small helpers without a mechanism: checks, dtypes, packing, positions, mesh axes, gathers."""
