"""Presets, one YAML file each; see `kvcache_compress.config.load_config`."""
