"""Decode attention in C++."""
