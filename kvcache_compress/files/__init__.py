"""Files: written whole, read with clear errors, locked against other processes."""
