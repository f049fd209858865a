"""The GPU kit: checks and measurements of the kernels on a GPU, behind `make bench-gpu`.

It needs torch, Triton and Transformers, and no other package; importing it makes the presets readable without pydantic.
"""

from .stand_in import provide

provide()
