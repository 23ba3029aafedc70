"""How a training is built: what it reads, its model engine, and how it continues an earlier one."""
