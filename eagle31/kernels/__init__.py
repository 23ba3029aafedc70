"""Operations with their own backward pass. They take tensors and sizes, and know no drafter."""
