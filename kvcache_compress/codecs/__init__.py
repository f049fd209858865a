"""Building blocks of compression methods, and the contract that a method fulfils (`base.py`)."""
