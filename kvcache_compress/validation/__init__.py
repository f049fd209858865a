"""Checks of user input and the words for what is wrong with it."""
