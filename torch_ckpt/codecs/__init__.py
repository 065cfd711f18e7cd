"""Transforms of one block's bytes. Knows bytes and numpy; nothing of tensors or storage."""
