"""What the enforcing stage saw and gave back, with `COOP_DUMP_TO=folder` set (see `passes.dump`)."""

from __future__ import annotations

import json

from passes.backend import BACKENDS
from passes.dump import dump
from passes.hlo import graph, proto
from passes.hlo.afterwards import as_xla_leaves_it
from passes.hlo.assign import Assigner
from passes.hlo.barriers import drop_barriers
from passes.hlo.describe import describe
from passes.hlo.enforce import EnforceRequest
from passes.hlo.lift import lift
from passes.ir import Program
from passes.listing import program_text
from passes.outcome import StageOutcome


def dump_enforced(data: bytes, returned: bytes, request: EnforceRequest, outcome: StageOutcome) -> None:
    """Write a scheduled module before and after, its kernels as a program, its heap, and what was done."""

    def assigner(module_bytes: bytes) -> Assigner:
        module = proto.parse(module_bytes)
        drop_barriers(module)
        view = as_xla_leaves_it(graph.read(module), BACKENDS[request.platform], old_rules=request.old_rules)
        return Assigner(view, request.platform, old_rules=request.old_rules)

    def kernels() -> Program:
        scheduled = assigner(data)
        return lift(scheduled.module, request.device, request.platform, assigner=scheduled).program

    dump(
        "hlo",
        {
            "scheduled.pb": lambda: data,
            "returned.pb": lambda: returned,
            "kernels.txt": lambda: program_text(kernels()),
            "kernels.json": lambda: kernels().to_json(),
            "before.map.json": lambda: describe(assigner(data)).to_json(),
            "after.map.json": lambda: describe(assigner(returned)).to_json(),
            "outcome.json": lambda: json.dumps(outcome.to_dict(), indent=1, default=str),
        },
    )
