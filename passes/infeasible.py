"""What to say when no partition fits: which device is over by how much, what the model needs, and what to try next."""

from __future__ import annotations

from hetpipe_compiler.errors import PlanningError
from hetpipe_compiler.ir.blocks import BlockChain
from hetpipe_compiler.passes.in_flight import LEANEST, InFlightRule
from hetpipe_compiler.passes.partition_search import Search
from hetpipe_compiler.passes.stage_memory import stage_memory

_MIB = 1 << 20


def does_not_fit(
    chain: BlockChain,
    search: Search,
    nm: int,
    *,
    by_hand: bool,
    largest_nm: int = 0,
    in_flight_rule: InFlightRule = LEANEST,
) -> PlanningError:
    """The error for a virtual worker that cannot hold ``nm`` minibatches however it is cut (or cut by hand).

    HP301: not even one minibatch fits, or ``largest_nm`` is unknown (0). HP305: ``largest_nm`` minibatches would fit.
    HP306: the cut by hand has more stages than the group has devices.
    """
    where = "virtual worker of " + ", ".join(d.id for members in search.classes.members for d in members)
    attempt = search.least_overflow(nm, in_flight_rule)
    if attempt is None:
        return PlanningError(
            "HP306",
            f"--split makes more stages than the virtual worker's {search.classes.devices} devices",
            where=where,
            hint="give fewer boundaries, or make larger virtual workers",
        )
    devices = search.classes.assign(attempt.classes)
    vector = in_flight_rule.vector(nm, len(devices))
    parts = [
        stage_memory(search.sums(blocks), w, device.kind, search.memory_rule, nm)
        for blocks, device, w in zip(attempt.stages, devices, vector, strict=True)
    ]
    over = [part["total"] - part["capacity"] for part in parts]
    worst = over.index(max(over))
    device = devices[worst]
    capacity = sum(d.kind.memory_bytes for members in search.classes.members for d in members)
    attempt_is = "order of devices" if by_hand else "cut"
    first, last = attempt.stages[worst][0], attempt.stages[worst][-1]
    largest = max((name for name in parts[worst] if name not in ("total", "capacity")), key=parts[worst].__getitem__)
    message = (
        f"{chain.name} does not fit with Nm = {nm}: in the best {attempt_is}, stage {worst}"
        f" ({chain.blocks[first].name} to {chain.blocks[last].name}) on {device.id} ({device.kind.name}) is over by"
        f" {over[worst] / _MIB:.1f} MiB, its largest part being {largest.replace('_', ' ')}; all stages need"
        f" {sum(part['total'] for part in parts) / _MIB:.0f} MiB, the devices have {capacity / _MIB:.0f} MiB"
    )
    smaller_batch = f"a batch smaller than {chain.batch_size}" if chain.batch_size > 1 else "a smaller model"
    another = "a cut that leaves that stage less" if by_hand else "another --policy that puts larger devices together"
    if largest_nm:
        return PlanningError(
            "HP305", message, where=where, hint=f"--nm {largest_nm} fits; or try {smaller_batch}, or {another}"
        )
    fewer = f"an --nm below {nm}, " if nm > 1 else ""
    return PlanningError("HP301", message, where=where, hint=f"try {smaller_batch}, {fewer}or {another}")
