"""Files: atomic writing, reading with clear errors, locks between processes."""
