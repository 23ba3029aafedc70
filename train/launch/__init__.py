"""Starting a run from outside: recipes composed, Slurm."""
