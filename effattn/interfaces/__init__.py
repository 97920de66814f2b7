"""Static configuration and inputs of the cores, the same for every implementation."""
