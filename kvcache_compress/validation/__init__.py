"""Checks of user input, and their error messages."""
