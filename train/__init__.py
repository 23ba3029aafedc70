"""The run: recipes, stages, training loop, evaluation, report."""
