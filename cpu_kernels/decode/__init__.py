"""Headers that decode codes, each included by the attention over them."""
