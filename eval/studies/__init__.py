"""Studies of quantizers apart from generation: distortion, nearest neighbours, layers and sides."""
