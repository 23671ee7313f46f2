"""The thunks of a compiled GPU program as one operation of another program.

XLA:GPU has a custom call, `thunky.inline_module`, that is replaced by the thunks in its attribute while the
program around it is compiled. Their buffers become the call's operands and results, temporaries included,
each one as large and as laid out inside as it was. Needs JAX 0.12.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from passes.jaxpr import compat

_CALL = "thunky.inline_module"


def inlined(
    data: bytes, results: Sequence[jax.ShapeDtypeStruct], aliases: Mapping[int, int]
) -> Callable[..., list[Any]]:
    """A function of a program's arguments, flat, that runs its thunks.

    Args:
        data: the program's executable, serialized.
        results: what it returns, flat.
        aliases: argument whose storage a result takes, by result.

    Raises:
        NotImplementedError: this version of JAX cannot do that.
    """
    module = compat.thunk_module(data)
    fresh = [n for n in range(len(results)) if n not in aliases]
    order = [*aliases, *fresh]

    def run(*arguments: Any) -> list[Any]:
        scratch = module.buffer_bytes[len(arguments) + len(fresh) :]
        buffers = [jax.ShapeDtypeStruct((n,), np.uint8) for n in scratch]
        call = jax.ffi.ffi_call(
            _CALL,
            [*(results[n] for n in order), *buffers],
            input_output_aliases={argument: n for n, argument in enumerate(aliases.values())},
        )
        flat_results = call(
            *arguments, *module.constants, module=module.message, num_aliased_outputs=np.int64(len(aliases)),
            num_scratch=np.int64(len(fresh) + len(scratch)),
        )  # fmt: skip
        return [flat_results[order.index(n)] for n in range(len(results))]

    return run
