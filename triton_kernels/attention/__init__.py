"""Decode attention: the kernel, its launcher, its tiles."""
