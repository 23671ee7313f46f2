"""What becomes of a random program: asked for within budgets, and compared with the undecorated one.

Every budget that is asked for gets a verdict. The promise is that none is among `BROKEN`:

    kept            XLA's total is within the budget, and results and effects are the plain program's
    refused         an error of `coop_jax`
    over            no error, and XLA's total is above the budget
    wrong           results or effects differ
    crashed         any other exception
    not monotone    refused where less is kept, or costs more than within less; or the least budget that a
                    refusal names is refused, or above the plain program's own total; or 1.0 is refused
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import export
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from coop_jax import aot
from coop_jax.errors import CoopError, UnsupportedError
from coop_jax.remat import remat
from coop_jax.report import report
from passes.cost import DEVICES
from tests import programs, ways
from tests.ways import Case

BROKEN = ("over", "wrong", "crashed", "not monotone")
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
# A program may amplify rounding: then its results are as uncertain as they are to such changes of its inputs.
INPUT_ROUNDING = {"float32": 2.0**-22, "bfloat16": 2.0**-8}
OF_ROUNDING = 16
COST_TOLERANCE = 1.001


class NotForJAXError(Exception):
    """JAX itself refuses the plain program, such as forward mode through a `custom_vjp`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One budget that was asked for.

    Attributes:
        what: why it was asked for, such as "budget" or "least".
        budget: bytes, or a fraction.
        verdict: see this file's head.
        total_bytes, cost_ns: of the program within it, by XLA and as estimated; None where there is none.
        least_bytes: what a refusal names.
        note: the error, or what is broken.
    """

    what: str
    budget: int | float
    verdict: str
    total_bytes: int | None = None
    cost_ns: int | None = None
    least_bytes: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """The undecorated program: XLA's count, and what it gives."""

    compiled: Any
    memory: aot.Memory
    results: Any
    seen: list[int]


def plain(case: Case) -> Plain:
    """Compile and run the undecorated program.

    Raises:
        NotForJAXError: JAX cannot.
    """
    try:
        compiled = _compiled(case, ways.program(case, lambda f: f))
        results, seen = _outcome(compiled, ways.arguments(case))
    except Exception as error:  # whatever it is, it is not about us
        raise NotForJAXError(f"{type(error).__name__}: {_line(error)}") from None
    return Plain(compiled=compiled, memory=aot.memory(compiled), results=results, seen=seen)


def asked(case: Case, undecorated: Plain) -> Iterator[Ask]:
    """Every budget of a case, with its verdict."""
    total = undecorated.memory.total_bytes
    first = ask(case, undecorated, "budget", _budget(case, undecorated.memory))
    kept = first
    yield _not_above(first, total, ways.constrained(case))
    if first.verdict == "refused" and first.least_bytes is not None:
        kept = ask(case, undecorated, "least", first.least_bytes)
        yield _must_be_kept(kept, f"{first.budget} was refused and this named")
    if first.verdict == "refused" and case.cached:
        yield from _again(case, first)
    if kept.verdict == "kept":
        budget = int(kept.budget + case.larger * (max(total, 1.2 * kept.budget) - kept.budget))
        yield _no_worse(ask(case, undecorated, "larger", budget), kept, undecorated)
    if case.fraction is not None:
        found = ask(case, undecorated, f"fraction {case.fraction}", case.fraction)
        unsupported = found.note.startswith(UnsupportedError.kind)
        must = case.fraction == 1.0 and not ways.constrained(case) and not unsupported
        yield _must_be_kept(found, "the whole of the plain program") if must else found
    if case.exported:
        yield from _exported(case, undecorated, _budget(case, undecorated.memory))


def check(case: Case) -> str:
    """Ask for one budget and, where it is refused, for the least that is named.

    Returns:
        A verdict, or "not for JAX" for what JAX itself refuses.

    Raises:
        AssertionError: something differs, a budget is broken, or an exception is not ours.
    """
    try:
        undecorated = plain(case)
    except NotForJAXError:
        return "not for JAX"
    found = ask(case, undecorated, "budget", _budget(case, undecorated.memory))
    if found.verdict == "refused" and found.least_bytes is not None:
        found = ask(case, undecorated, "least", found.least_bytes)
    assert found.verdict in ("kept", "refused"), found
    return found.verdict


def ask(case: Case, undecorated: Plain, what: str, budget: int | float) -> Ask:
    """One budget: compile within it, run, compare."""
    return _tried(case, undecorated, what, budget, lambda: ways.program(case, ways.decorator(budget, case)))


def _tried(case: Case, undecorated: Plain, what: str, budget: int | float, program: Callable[[], Any]) -> Ask:
    try:
        compiled = _compiled(case, program())
        total = aot.memory(compiled).total_bytes
        found = Ask(what=what, budget=budget, verdict="kept", total_bytes=total)
        if isinstance(budget, int) and total > budget:
            return dataclasses.replace(found, verdict="kept" if _is_gone(case, budget) else "over")
        wrong = difference(case, undecorated, compiled)
        if wrong:
            return dataclasses.replace(found, verdict="wrong", note=wrong)
        try:
            report(compiled)
        except UnsupportedError:
            if not _is_gone(case, budget):
                raise
        return dataclasses.replace(found, cost_ns=aot.run_ns(compiled, DEVICES["cpu"]))
    except CoopError as error:
        return _refusal(what, budget, error)
    except Exception as error:
        return Ask(what=what, budget=budget, verdict="crashed", note=_trace(error))


def _is_gone(case: Case, budget: int | float) -> bool:
    """True if nothing decorated is left: JAX drops what no result needs, such as a gradient that is zero."""
    programs = (ways.program(case, ways.decorator(budget, case)), ways.program(case, lambda f: f))
    within, plain_text = (_lowered(case, p).as_text() for p in programs)
    return bool(within == plain_text)


def difference(case: Case, undecorated: Plain, compiled: Any) -> str:
    """How results and effects differ from the plain program's; "" if they do not."""
    found, seen = _outcome(compiled, ways.arguments(case))
    if not _has_same_effects(case, seen, undecorated.seen):
        return f"effects {seen}, not {undecorated.seen}"
    if jax.tree.structure(found) != jax.tree.structure(undecorated.results):
        return f"{jax.tree.structure(found)}, not {jax.tree.structure(undecorated.results)}"
    off = _off(found, undecorated.results)
    allowed = TOLERANCE[case.dtype]
    if np.all(off <= allowed):
        return ""
    uncertain = np.maximum(allowed, OF_ROUNDING * _sensitivity(case, undecorated))
    if np.all(off <= uncertain):
        return ""
    worst = int(np.argmax(off / uncertain))
    return f"result {worst} is off by {off[worst]:.2g} of its norm, {uncertain[worst]:.2g} is allowed"


def _has_same_effects(case: Case, seen: list[int], plain: list[int]) -> bool:
    """True if a program tells Python what the plain one does, as often.

    JAX itself loses ordered effects of a scan under some gradients, and `jax.checkpoint` repeats effects.
    """
    kinds = programs.kinds_in(case.recipe)
    if "ordered" in kinds and not plain:
        return True
    return set(seen) == set(plain) if "checkpoint" in kinds else seen == plain


def _off(found: Any, expected: Any) -> np.ndarray:
    """For every result its largest difference over its largest value, infinite where only one is a number."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return np.array([_distance(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs])


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if a.shape != b.shape:
        return np.inf
    if same.all():
        return 0.0
    finite = np.abs(b[np.isfinite(b)])
    scale = finite.max(initial=0.0) + 1e-9
    gap = np.where(same, 0.0, np.abs(a - b))
    return float(np.where(np.isfinite(gap), gap, np.inf).max() / scale)


def _sensitivity(case: Case, undecorated: Plain) -> np.ndarray:
    """For every result of the plain program how far rounding of its inputs moves it."""
    off = np.zeros(len(jax.tree.leaves(undecorated.results)))
    for seed in range(4):
        noise = np.random.default_rng(seed)
        ws, x, *rest = ways.arguments(case)
        moved = [
            jax.device_put(
                (v * (1 + INPUT_ROUNDING[case.dtype] * noise.choice([-1, 1], v.shape))).astype(v.dtype),
                v.sharding,
            )
            for v in (ws, x)
        ]
        off = np.maximum(off, _off(_outcome(undecorated.compiled, (*moved, *rest))[0], undecorated.results))
    return off


def _budget(case: Case, memory: aot.Memory) -> int:
    if case.of_total:
        return int(case.ratio * memory.total_bytes)
    return memory.fixed_bytes + int(case.ratio * memory.temp_bytes)


def _again(case: Case, first: Ask) -> Iterator[Ask]:
    """What was refused is refused whenever it is asked for again, with the same error."""
    jitted = _jitted(case, ways.program(case, ways.decorator(first.budget, case)))
    for what in ("first call", "second call", "call after clear_caches", "second such call"):
        if what == "call after clear_caches":
            jax.clear_caches()
        try:
            jax.block_until_ready(jitted(*ways.arguments(case)))
            yield Ask(what=what, budget=first.budget, verdict="over", note="ran, though it was refused")
        except CoopError as error:
            found = _refusal(what, first.budget, error)
            same = found.note.split(":")[0] == first.note.split(":")[0]
            yield found if same else dataclasses.replace(found, verdict="not monotone")
        except Exception as error:
            yield Ask(what=what, budget=first.budget, verdict="crashed", note=_trace(error))


def _exported(case: Case, undecorated: Plain, budget: int) -> Iterator[Ask]:
    """A decorated program is not exported over its budget; an exported plain one can be decorated."""
    args = ways.arguments(case)
    try:
        plain_export = export.export(_jitted(case, ways.program(case, lambda f: f)))(*args)
    except Exception:  # such as an effect
        return
    what = "exported"
    try:
        within = export.export(_jitted(case, ways.program(case, ways.decorator(budget, case))))(*args)
        yield _tried(case, undecorated, what, budget, lambda: within.call)
    except CoopError as error:
        yield _refusal(what, budget, error)
    except Exception as error:
        yield Ask(what=what, budget=budget, verdict="crashed", note=_trace(error))
    yield _tried(
        case, undecorated, "decorated export", budget, lambda: remat(plain_export.call, budget=budget)
    )


def _refusal(what: str, budget: int | float, error: CoopError) -> Ask:
    least = getattr(error, "least_bytes", None)
    note = f"{type(error).__name__}: {_line(error)}"
    return Ask(what=what, budget=budget, verdict="refused", least_bytes=least, note=note)


def _not_above(found: Ask, total: int, constrained: bool) -> Ask:
    """A refusal's least budget is not above what the plain program needs, unless more is asked of it."""
    if found.verdict != "refused" or found.least_bytes is None or constrained or found.least_bytes <= total:
        return found
    note = f"names {found.least_bytes}, the plain program needs {total}; {found.note}"
    return dataclasses.replace(found, verdict="not monotone", note=note)


def _must_be_kept(found: Ask, why: str) -> Ask:
    if found.verdict != "refused":
        return found
    return dataclasses.replace(found, verdict="not monotone", note=f"refused, but {why}; {found.note}")


def _no_worse(found: Ask, kept: Ask, undecorated: Plain) -> Ask:
    """What is kept is kept within more, at no greater cost: or as the plain program, if that is within it."""
    found = _must_be_kept(found, f"{kept.budget} is kept with {kept.total_bytes}")
    if found.verdict != "kept" or found.cost_ns is None or kept.cost_ns is None:
        return found
    allowed_ns = kept.cost_ns
    if undecorated.memory.total_bytes <= found.budget:
        allowed_ns = max(allowed_ns, aot.run_ns(undecorated.compiled, DEVICES["cpu"]))
    if found.cost_ns <= COST_TOLERANCE * allowed_ns:
        return found
    note = f"costs {found.cost_ns} ns, {kept.cost_ns} within {kept.budget}"
    return dataclasses.replace(found, verdict="not monotone", note=note)


def _jitted(case: Case, program: Any) -> Any:
    return jax.jit(lambda *args: program(*args), donate_argnums=ways.donated(case))


def _lowered(case: Case, program: Any) -> Any:
    return _jitted(case, program).lower(*ways.arguments(case))


def _compiled(case: Case, program: Any) -> Any:
    return _lowered(case, program).compile({"xla_backend_optimization_level": "0"})


def _outcome(compiled: Any, args: Any) -> tuple[Any, list[int]]:
    """Results, and what effects reported."""
    programs.SEEN.clear()
    results = jax.block_until_ready(compiled(*args))
    jax.effects_barrier()
    return jax.tree.map(np.asarray, results), sorted(programs.SEEN)


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:300]


def _trace(error: BaseException) -> str:
    """The error and where it came from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/jax/_src/" not in f.filename][-3:]
    places = ", ".join(f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno} {f.name}" for f in frames)
    return f"{type(error).__name__}: {_line(error)} at {places}"


@contextlib.contextmanager
def compilation_cache(folder: str | None) -> Iterator[None]:
    """JAX's compilation cache in `folder`, for every program; None for no cache."""
    names = (
        "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    try:
        _configure(dict(zip(names, (folder, 0, -1), strict=True)))
        yield
    finally:
        _configure(before)


def _configure(options: dict[str, Any]) -> None:
    for name, value in options.items():
        jax.config.update(name, value)
    jax_cache.reset_cache()
