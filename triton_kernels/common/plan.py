"""Launches that are repeated from step to step, without working out again what does not change.

Triton's own launch looks at all arguments, 42 of the attention kernel and those in their tuples, to find the compiled
kernel for their types, alignments and constants. A plan remembers the kernel and what is constant, and hands over
addresses where Triton takes tensors. Whoever keeps it compares all else that Triton looks at. On AMD's
GPUs that is the size of each tensor's memory too, so nothing is repeated there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from triton import knobs
from triton.runtime.driver import driver

AMD = torch.version.hip is not None
ALIGNMENT = 256
"""Bytes, in scratch memory; Triton compiles for multiples of 16."""
MAX_NARROW = 2**31 - 1
MAX_KEPT, MAX_SHARED = 8, 256
"""Kept by a layer, and by all layers together, of what differs between calls: numbers of tokens grow for ever."""
KernelCall: TypeAlias = tuple[Any, tuple[int, int, int], dict[str, Any]]
"""A kernel, its grid and its arguments by name."""
Kept = TypeVar("Kept")


def kept(store: dict[Any, Kept], key: Any, value: Kept, most: int = MAX_KEPT) -> Kept:
    """`value`, which `store` keeps from now on."""
    if len(store) >= most:
        store.clear()
    store[key] = value
    return value


def addresses(values: dict[str, Any]) -> tuple[dict[str, Any], bool, bool]:
    """The addresses of all tensors among `values`, also of those in tuples.

    And what Triton compiles other kernels for, whatever they specialise on: whether all addresses are aligned, and
    whether all numbers have 32 bits.
    """
    found = {}
    bits, narrow = 0, True
    for name, x in values.items():
        if type(x) is not int:
            if type(x) is tuple:
                x = tuple([part.data_ptr() for part in x])
                for address in x:
                    bits |= address
            else:
                x = x.data_ptr()
                bits |= x
        elif x > MAX_NARROW:
            narrow = False
        found[name] = x
    return found, bits % 16 == 0, narrow


def _address(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_address(part) for part in x)
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


class Launch:
    """A kernel, its grid and those of its arguments that stay; Triton launches it once, then its compiled form."""

    def __init__(self, call: KernelCall, given: dict[str, Any]) -> None:
        """`given`: arguments, by name, that each call gives anew; where others are the same tensor, these too."""
        self.kernel, self.grid, arguments = call
        sources = {id(x): name for name, x in given.items() if isinstance(x, torch.Tensor)}
        self.changing = {
            name: name if name in given else sources[id(x)]
            for name, x in arguments.items()
            if name in given or id(x) in sources
        }
        self.constant = {name: x for name, x in arguments.items() if name not in self.changing}
        self.places = [(self.kernel.arg_names.index(name), source) for name, source in self.changing.items()]
        self.values = [_address(self.constant.get(name)) for name in self.kernel.arg_names]
        self.compiled: Any = None

    def first(self, given: dict[str, Any]) -> None:
        """Launches it by Triton, with tensors."""
        changing = {name: given[source] for name, source in self.changing.items()}
        self.compiled = self.kernel[self.grid](**self.constant, **changing)

    def again(self, given: dict[str, Any], stream: int, profiled: bool) -> None:
        """Launches it as it was compiled, with addresses; through Triton where a profiler asks for more than that."""
        values = self.values.copy()
        for place, source in self.places:
            values[place] = given[source]
        compiled = self.compiled
        if profiled:
            compiled[self.grid](*values, stream=stream)
        else:
            compiled.run(*self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


class Plan:
    """The launches of one call, and the memory that they fill, for all calls like it."""

    def __init__(
        self,
        calls: Sequence[KernelCall],
        inputs: dict[str, Any],
        scratch: dict[str, torch.Tensor],
        repeat: bool,
    ) -> None:
        """Of a call of kernels, `inputs` and `scratch`, which is what they fill for each other, among their arguments.

        `repeat`: whether compiled kernels may be launched again, as Triton would choose the same for each such call.
        """
        self.launches = [Launch(call, inputs | scratch) for call in calls]
        self.repeat = repeat
        self.scratch = {name: (x.shape, x.dtype) for name, x in scratch.items()}
        self.offsets: list[tuple[str, int]] = []
        self.bytes = 0
        for name, x in scratch.items():
            self.offsets.append((name, self.bytes))
            self.bytes += -(-x.nbytes // ALIGNMENT) * ALIGNMENT

    @property
    def compiled(self) -> bool:
        """Whether the kernels are known; Triton's interpreter compiles nothing."""
        return self.repeat and self.launches[-1].compiled is not None

    def run(self, inputs: dict[str, Any], found: dict[str, Any], device: torch.device) -> None:
        """Launches all kernels; `found` are the addresses of `inputs`."""
        if not self.compiled:
            fresh = {
                name: torch.empty(shape, dtype=dtype, device=device) for name, (shape, dtype) in self.scratch.items()
            }
            for launch in self.launches:
                launch.first(inputs | fresh)
            return
        if self.bytes:
            memory = torch.empty(self.bytes, dtype=torch.uint8, device=device)
            start = memory.data_ptr()
            for name, offset in self.offsets:
                found[name] = start + offset
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        profiled = bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
        for launch in self.launches:
            launch.again(found, stream, profiled)


_plans: dict[tuple[Any, ...], Plan] = {}


def repeated(
    kernel: Any, grid: tuple[int, int, int], inputs: dict[str, Any], constants: dict[str, Any], device: torch.device
) -> None:
    """Launches a kernel that needs no scratch memory, again where types, alignment and `constants` are as they were.

    `inputs` are tensors, tuples of tensors, and numbers on whose values Triton does not specialise.
    """
    found, aligned, narrow = addresses(inputs)
    repeatable = aligned and narrow
    tensors = [x for x in inputs.values() if type(x) is not int]
    dtypes = tuple([tuple([part.dtype for part in x]) if type(x) is tuple else x.dtype for x in tensors])
    key = (kernel, grid, dtypes, tuple(constants.values()), device, repeatable)
    plan = _plans.get(key)
    if plan is None:
        plan = Plan([(kernel, grid, inputs | constants)], inputs, {}, repeat=repeatable and not AMD)
        kept(_plans, key, plan, MAX_SHARED)
    plan.run(inputs, found, device)
