"""Storage of a layer's tokens, `sinks | packed | tail` per side, in growing or static buffers."""
