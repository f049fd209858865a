"""Triton's interpreter with a quicker start of device functions, and with sums as on devices."""

import inspect
import math
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def patch() -> None:
    """Change the interpreter of this process, once."""
    _patch_language_once()
    _patch_types()
    _patch_sums()


def _patch_language_once() -> None:
    """Let device functions rely on their kernel's patches of `triton.language`.

    The interpreter patches the language at a kernel's start, restores it at the end, and repeats the first at every
    call of a device function in between, to no effect; that repetition is a third of its time.
    """
    patch = interpreter._patch_lang

    def patch_unless_done(fn: Any) -> Any:
        languages = [value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)]
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()
        return patch(fn)

    interpreter._patch_lang = patch_unless_done


def _patch_sums() -> None:
    """Make sums begin with their first number, as lanes do: the sum of -0.0 is -0.0, and not NumPy's 0.0."""

    def sum_from_first(reduction: Any, values: Any) -> Any:
        data, kept = values.handle.data, reduction.keep_dims
        total = np.sum(data, axis=reduction.axis, keepdims=kept, initial=data.dtype.type(-0.0))
        return reduction.to_tensor(total, values.dtype)

    interpreter.ReduceOps.sum = sum_from_first


def _patch_types() -> None:
    """Keep the interpreter from computing shapes and NumPy's types anew for every tensor, and what it throws away.

    It asserts that sums and products do not overflow only in Triton's debug mode, but computes them in 64 bits in
    every mode, which takes half of its time.
    """
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    known = interpreter._get_np_dtype
    by_name: dict[str, Any] = {}
    shapes: dict[tuple[int, ...], Any] = {}

    def type_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in by_name:
            by_name[name] = known(kind)
        return by_name[name]

    def init(tensor: tl.tensor, handle: Any, kind: Any) -> None:
        shape = tuple(kind.shape) if kind.is_block() else ()
        if shape not in shapes:
            shapes[shape] = tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.numel, tensor.shape = shapes[shape]

    interpreter._get_np_dtype = type_of
    tl.tensor.__init__ = init
