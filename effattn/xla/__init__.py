"""XLA implementations of the cores: any device, memory linear in length, forward and backward."""
