"""Facts about Transformers' models: shapes, layer types, RoPE, adapters; and how models are loaded."""
