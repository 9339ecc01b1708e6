"""Expert weights of this rank, their placement and their load."""
