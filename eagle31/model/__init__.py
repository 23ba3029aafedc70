"""The drafter: its configuration, its modules, its vocabulary, and the frozen parts that it uses."""
