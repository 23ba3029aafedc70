"""Starting a run from another command: composing its recipe, and Slurm batch scripts."""
