"""Continuous batching of Transformers (5.19 to 5.24) with compressed pages. Its private names are used only here."""
