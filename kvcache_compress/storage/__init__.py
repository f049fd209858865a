"""Tokens of one layer: `sinks | packed | tail` of its two sides, in growing or in fixed buffers."""
