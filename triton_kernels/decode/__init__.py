"""Device functions that score and accumulate packed tokens, one file per method."""
