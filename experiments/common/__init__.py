"""What the experiments share: corpora, tokenizers, data, training, checkpoints and reports."""
