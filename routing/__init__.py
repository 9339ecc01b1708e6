"""Router scores to top-k, row permutation, dispatch and combine."""
