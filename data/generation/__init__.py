"""Generating answers with the target, in transformers or vLLM, into a file that a later run resumes."""
