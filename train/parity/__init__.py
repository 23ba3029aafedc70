"""An export in vLLM compared with eagle31's own evaluator."""
