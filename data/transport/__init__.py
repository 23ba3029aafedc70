"""From a producer's process to a trainer's."""
