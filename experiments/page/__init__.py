"""Parts of the page that `experiments.report` writes from all results."""
