"""The identity of a result: model, text, options, machine and code."""
