"""What is told of expert load, as text and as files."""
