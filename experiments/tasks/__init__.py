"""Tasks of the experiments: seeded examples, the positions that count, and measures of success."""
