"""Live ranges that leave the device and come back: one lifetime on the device becomes several.

A live range with pages is on the device from its run until its first page's `out_done`, from each page's
`in_start` until the next one's `out_done`, and at the end until its last use. On the example of
`passes.ir`, a page of `b` (run 1, out done 3, in start 4, in done 4) splits its lifetime [1, 5) into
[1, 3) and [4, 5).
"""

from __future__ import annotations

from collections.abc import Sequence

from passes.ir import Page


def pages_by_range(pages: Sequence[Page]) -> dict[tuple[int, int], list[Page]]:
    """Pages of each live range, named by (run, buffer), in the order of time.

    Raises:
        ValueError: a page of an argument, or one whose moments are out of order.
    """
    by_range: dict[tuple[int, int], list[Page]] = {}
    for page in sorted(pages, key=lambda p: (p.buffer, p.out_done, p.in_start, p.in_done)):
        if page.run is None:
            raise ValueError(f"buffer {page.buffer} is an argument, which stays on the device: {page}")
        if not page.run < page.out_done <= page.in_start <= page.in_done:
            raise ValueError(f"the moments of a page are out of order: {page}")
        same = by_range.setdefault((page.run, page.buffer), [])
        if same and page.out_done < same[-1].in_done:
            raise ValueError(f"two pages of one live range overlap: {same[-1]} and {page}")
        same.append(page)
    return by_range


def check_served(page: Page, uses: Sequence[int], end: int | None) -> None:
    """Raise unless every use of a live range finds it on the device, and something needs it back.

    Args:
        uses: steps that read the live range, ascending.
        end: the number of steps if the live range must be there after the last one, else None.
    """
    caught = [use for use in uses if page.out_done <= use < page.in_done]
    if caught:
        raise ValueError(f"step {caught[0]} reads buffer {page.buffer} while it is away: {page}")
    if end is not None and end in (page.in_start, page.out_done):
        raise ValueError(f"output {page.buffer} must have its bytes again before the last step: {page}")
    needs = [*uses, *([] if end is None else [end])]
    if not needs or page.in_done > needs[-1]:
        raise ValueError(f"nothing needs buffer {page.buffer} when it is back: {page}")
