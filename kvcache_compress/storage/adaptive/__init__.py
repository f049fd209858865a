"""What follows the text: statistics by era, and bits by layer."""
