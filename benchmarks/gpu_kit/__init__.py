"""The GPU kit: checks and measurements of the kernels on a GPU, behind `make bench-gpu` and `make tune-gpu`."""
