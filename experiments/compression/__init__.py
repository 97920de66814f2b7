"""Training of compressed forms of a model, for `experiments.compress`."""
