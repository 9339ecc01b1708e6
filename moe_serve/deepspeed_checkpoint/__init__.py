"""What DeepSpeed saves of a model in training, as tensors under the names of Hugging Face."""
