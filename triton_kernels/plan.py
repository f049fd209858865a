"""Launches that are repeated from step to step, without working out again what does not change.

Triton's own launch looks at all arguments, 60 of the attention kernel, to find the compiled kernel for their types,
alignments and constants. A plan remembers the kernel and what is constant. Whoever keeps it
compares all else that Triton looks at. On AMD's GPUs that is the size of each tensor's memory too, so nothing is
repeated there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def are_aligned(values: Iterable[Any]) -> bool:
    """Whether all tensors, also those in tuples, begin at multiples of 16 bytes, which Triton compiles for."""
    bits = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            bits |= value.data_ptr()
        elif isinstance(value, tuple):
            for x in value:
                bits |= x.data_ptr()
    return bits % 16 == 0


class Launch:
    """A kernel, its grid and those of its arguments that stay; Triton launches it once, then its compiled form."""

    def __init__(
        self, kernel: Any, grid: tuple[int, int, int], arguments: dict[str, Any], given: dict[str, Any], repeat: bool
    ) -> None:
        """`given`: arguments, by name, that each call gives anew; where others are the same tensor, these too."""
        sources = {id(x): name for name, x in given.items() if isinstance(x, torch.Tensor)}
        self.changing = {
            name: name if name in given else sources[id(x)]
            for name, x in arguments.items()
            if name in given or id(x) in sources
        }
        self.kernel, self.grid, self.repeat = kernel, grid, repeat
        self.constant = {name: x for name, x in arguments.items() if name not in self.changing}
        self.places = [(kernel.arg_names.index(name), source) for name, source in self.changing.items()]
        self.values = [self.constant.get(name) for name in kernel.arg_names]
        self.compiled: Any = None

    def __call__(self, given: dict[str, Any]) -> None:
        if self.compiled is not None:
            values = self.values.copy()
            for place, source in self.places:
                values[place] = given[source]
            self.compiled(*values)
            return
        changing = {name: given[source] for name, source in self.changing.items()}
        compiled = self.kernel[self.grid](**self.constant, **changing)
        if self.repeat and compiled is not None:  # Triton's interpreter compiles nothing
            self.compiled = compiled[self.grid]


class Plan:
    """The launches of one call, and the buffers that they fill, for all calls like it."""

    def __init__(
        self,
        launches: Sequence[tuple[Any, tuple[int, int, int], dict[str, Any]]],
        inputs: dict[str, Any],
        outputs: dict[str, torch.Tensor],
        repeat: bool,
    ) -> None:
        """Of a call whose kernels, grids and arguments are `launches`, `inputs` and `outputs` being among the latter.

        `repeat`: whether compiled kernels may be launched again, as Triton would choose the same for each such call.
        """
        self.launches = [Launch(*launch, inputs | outputs, repeat) for launch in launches]
        self.outputs = {name: (x.shape, x.dtype) for name, x in outputs.items()}

    def run(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Launches all kernels, and gives the buffers that they fill."""
        like = inputs["p_q"]
        outputs = {name: like.new_empty(shape, dtype=dtype) for name, (shape, dtype) in self.outputs.items()}
        given = inputs | outputs
        for launch in self.launches:
            launch(given)
        return outputs
