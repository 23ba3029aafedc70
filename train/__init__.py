"""A training run: recipe, stages, training loop, evaluation, report."""
