"""The pipeline's stages, with a file for each."""
