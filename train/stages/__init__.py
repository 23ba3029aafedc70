"""The pipeline's stages, with a file for each, and what concerns several of them."""
