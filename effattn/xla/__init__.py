"""The cores in plain XLA: any device, memory linear in length, forward and backward."""
