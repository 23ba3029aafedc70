"""The checkpoint that vLLM loads: layouts, writing, reading, rules, verification."""
