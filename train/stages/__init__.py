"""The pipeline's stages, one file each, named after them."""
