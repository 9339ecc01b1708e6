"""Weights of experts on their way between ranks."""
