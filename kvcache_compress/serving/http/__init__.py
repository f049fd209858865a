"""Transformers' OpenAI-compatible server over compressed pages, alone or in replicas."""
