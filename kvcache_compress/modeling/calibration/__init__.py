"""Steps that all calibrations share: reading text and observing attention."""
