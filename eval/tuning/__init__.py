"""Tune a cache for a model and a budget: measure what each side of each layer costs, share bits out, and certify it."""
