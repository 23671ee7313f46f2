"""A compiled program as the memory it uses: what each kernel reads and writes of one allocation.

This is all that is needed to move temporaries in an executable: names, operations and other allocations do
not matter. A slice is one mention of a byte range in the executable. Moving a program means to give every
slice another offset.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One mention of a slice by a kernel. Both flags may be set.

    Attributes:
        slice: index into `SliceProgram.slices`.
        reads, writes: what the kernel does there; a write covers the whole slice unless it also reads.
    """

    slice: int
    reads: bool
    writes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A kernel. All of its accesses happen at once: it may write before it has read everything."""

    name: str
    accesses: tuple[Access, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """`test`, then read `flag`; while it says so: `body`, `test`, read `flag`.

    Attributes:
        test_runs: False if the number of iterations is known, so that `test` may or may not be run.
    """

    name: str
    test: tuple[Node, ...]
    flag: tuple[Access, ...]
    body: tuple[Node, ...]
    test_runs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Read `index`, then run one of `branches`."""

    name: str
    index: tuple[Access, ...]
    branches: tuple[tuple[Node, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Run `body` once."""

    name: str
    body: tuple[Node, ...]


Node = Run | Loop | Branch | Call


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes `offset` to `end` (exclusive) of the allocation."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """The byte after the last."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceProgram:
    """A program's temporaries.

    Attributes:
        nbytes: size of the allocation that the slices lie in. Nothing is in it before the program starts,
            and nobody looks at it afterwards.
        alignment: what kernels were compiled to expect of addresses.
        slices: every mention of the allocation in the executable, in its order.
        body: the program.
    """

    nbytes: int
    alignment: int
    slices: tuple[Slice, ...]
    body: tuple[Node, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Another place for every slice.

    Attributes:
        nbytes: size of the allocation afterwards.
        offsets: by slice.
    """

    nbytes: int
    offsets: tuple[int, ...]
