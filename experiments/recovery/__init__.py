"""Training of models whose attention is exchanged after training, for `experiments.finetune`."""
