"""Training of models whose attention is replaced after training, for `experiments.finetune`."""
