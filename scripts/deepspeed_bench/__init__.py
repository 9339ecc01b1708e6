"""Ours beside DeepSpeed's, on the same weights."""
