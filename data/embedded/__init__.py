"""The embedded target: a small Llama that is trained on this machine, for use without a download."""
