"""Facts about Transformers' models (shapes, layer types, RoPE, adapters), and loading of models."""
