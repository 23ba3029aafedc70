"""How a training is built: its inputs, what it reads, its engine, and how it continues an earlier one."""
