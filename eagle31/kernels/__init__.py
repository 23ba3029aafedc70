"""Operations with their own backward pass; they take tensors and sizes, and know no drafter."""
