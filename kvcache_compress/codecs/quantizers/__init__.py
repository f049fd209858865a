"""Quantizers: numbers, pairs or vectors to codes and back."""
