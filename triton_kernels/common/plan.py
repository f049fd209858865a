"""Repeat launches from step to step without recomputing what does not change.

Triton's own launch inspects all arguments (42 of the attention kernel, and the members of its tuples) to find the
kernel compiled for their types, alignments and constants. A plan remembers the compiled kernel and the constants, and
passes addresses where Triton expects tensors. Its owner compares everything else that Triton inspects.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from triton import knobs
from triton.runtime.driver import driver

from kvcache_compress.codecs.device import interpreting

PORTABLE = interpreting() or torch.version.hip is not None
ALIGNMENT = 256
"""Alignment of buffers in scratch memory, in bytes; Triton compiles for multiples of 16."""
MAX_NARROW = 2**31 - 1
MAX_KEPT, MAX_SHARED = 8, 256
"""Entries kept by a layer, and by all layers together: bounded, since the number of tokens grows with every call."""
KernelCall: TypeAlias = tuple[Any, tuple[int, int, int], dict[str, Any]]
"""A kernel, its grid and its arguments by name."""
Kept = TypeVar("Kept")


def portable() -> bool:
    """True on AMD GPUs and in Triton's interpreter, where kernels use no assembly, TF32 or limit of registers.

    Launches are not repeated there. Triton specialises kernels for AMD by more than a plan's owner compares: by the
    size of each tensor's memory, too.
    """
    return PORTABLE


def kept(store: dict[Any, Kept], key: Any, value: Kept, most: int = MAX_KEPT) -> Kept:
    """Keep `value` in `store` under `key` and return it; a full store is cleared first."""
    if len(store) >= most:
        store.clear()
    store[key] = value
    return value


def addresses(values: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Addresses of all tensors among `values`, also in tuples; True if all are aligned to 16 bytes and numbers narrow.

    Triton compiles separate kernels for other pointers, and for 64-bit integers.
    """
    pointers = {}
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
        pointers[name] = x
    return pointers, narrow and bits % 16 == 0


def _address(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(_address(part) for part in x)
    return x.data_ptr() if isinstance(x, torch.Tensor) else x


def check_lanes(name: str, asm: Mapping[str, Any]) -> None:
    """Raise `RuntimeError` if a compiled kernel moves tables that differ from lane to lane, which would be wrong.

    `polar_columns.lane_table` holds a different number in each lane, unknown to Triton.
    """
    if "%laneid" in asm.get("ptx", "") and re.search(r"convert_layout .*<1x1xi32", asm["ttgir"]):
        raise RuntimeError(f"{name} moves a tile [1, 1] between lanes")


_checked: set[str] = set()


class Launch:
    """A kernel with its grid and constant arguments: launched by Triton once, then in its compiled form."""

    def __init__(self, call: KernelCall, inputs: dict[str, Any]) -> None:
        """Sort the call's arguments into constant ones and those that change with each call.

        `inputs` are those that change, by name; other arguments that are the same tensor change with them.
        """
        self.kernel, self.grid, arguments = call
        sources = {id(x): name for name, x in inputs.items() if isinstance(x, torch.Tensor)}
        self.changing = {
            name: name if name in inputs and inputs[name] is x else sources.get(id(x), name)
            for name, x in arguments.items()
            if name in inputs or id(x) in sources
        }
        self.constant = {name: x for name, x in arguments.items() if name not in self.changing}
        self.places = [(self.kernel.arg_names.index(name), source) for name, source in self.changing.items()]
        self.values = [_address(self.constant.get(name)) for name in self.kernel.arg_names]
        self.compiled: Any = None

    def first(self, inputs: dict[str, Any]) -> None:
        """Launch it by Triton, with tensors, and keep the compiled kernel, if it passes `check_lanes`."""
        changing = {name: inputs[source] for name, source in self.changing.items()}
        compiled = self.kernel[self.grid](**self.constant, **changing)
        if compiled is not None and compiled.hash not in _checked:
            check_lanes(compiled.name, compiled.asm)
            _checked.add(compiled.hash)
        self.compiled = compiled

    def again(self, pointers: dict[str, Any], stream: int, profiled: bool) -> None:
        """Launch the compiled kernel with addresses; through Triton if a profiler's hooks need it."""
        values = self.values.copy()
        for place, source in self.places:
            values[place] = pointers[source]
        compiled = self.compiled
        if profiled:
            compiled[self.grid](*values, stream=stream)
        else:
            compiled.run(*self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values)


class Plan:
    """The launches of one call and their scratch memory, for all calls like it."""

    def __init__(
        self, calls: Sequence[KernelCall], inputs: dict[str, Any], scratch: dict[str, torch.Tensor], repeat: bool
    ) -> None:
        """Plan the kernels `calls`; among their arguments are `inputs`, and `scratch` that one fills for another.

        `repeat`: True if Triton would choose the same compiled kernels for each such call.
        """
        self.launches = [Launch(call, inputs | scratch) for call in calls]
        self.repeat = repeat and not portable()
        self.scratch = {name: (x.shape, x.dtype) for name, x in scratch.items()}
        self.offsets: list[tuple[str, int]] = []
        self.bytes = 0
        for name, x in scratch.items():
            self.offsets.append((name, self.bytes))
            self.bytes += -(-x.nbytes // ALIGNMENT) * ALIGNMENT

    @property
    def compiled(self) -> bool:
        """True once all kernels are compiled."""
        return self.repeat and self.launches[-1].compiled is not None

    def run(self, inputs: dict[str, Any], pointers: dict[str, Any], device: torch.device) -> None:
        """Launch all kernels; `pointers` are the addresses of `inputs`."""
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
                pointers[name] = start + offset
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        profiled = bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
        for launch in self.launches:
            launch.again(pointers, stream, profiled)


_plans: dict[tuple[Any, ...], Plan] = {}


def repeated(
    kernel: Any,
    inputs: dict[str, Any],
    kind: tuple[Any, ...],
    complete: Callable[[], tuple[tuple[int, int, int], dict[str, Any]]],
    device: torch.device,
) -> None:
    """Launch a kernel that needs no scratch memory, in its compiled form if a call of this kind has been made before.

    Args:
        inputs: arguments that change from call to call: tensors, tuples of tensors, and numbers on whose values Triton
            does not specialise.
        kind: what determines the grid, all other arguments, and the dtypes of the inputs.
        complete: returns the grid and the other arguments; called for the first call of a kind only.
    """
    pointers, repeatable = addresses(inputs)
    key = kernel, kind, device, repeatable
    plan = _plans.get(key)
    if plan is None:
        grid, constants = complete()
        plan = kept(_plans, key, Plan([(kernel, grid, inputs | constants)], inputs, {}, repeatable), MAX_SHARED)
    plan.run(inputs, pointers, device)
