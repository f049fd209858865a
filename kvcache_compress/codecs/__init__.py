"""Building blocks of methods, and the contract of a method (`base.py`)."""
