"""The layers that a decoder is made of."""
