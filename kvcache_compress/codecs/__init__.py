"""Parts that methods are made of, and the contract of a method (`base.py`)."""
