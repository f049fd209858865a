"""Where a result comes from: model, text, options, machine and code."""
