"""Attention over compressed layers: the registered function, its switch, compiled steps and position hooks."""
