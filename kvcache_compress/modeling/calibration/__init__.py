"""What methods that learn from a model share: texts, observed attention, the frame of a command."""
