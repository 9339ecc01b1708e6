"""From any source of tensors to a folder in Hugging Face's layout."""
