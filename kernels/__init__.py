"""Operations on tensors; every one has a plain torch reference."""
