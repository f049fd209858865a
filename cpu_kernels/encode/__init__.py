"""Encoders in C++."""
