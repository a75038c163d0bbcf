"""Put measured times in place of estimates, for every node whose key a profile has.

1. A profile counts for the device kind that it names. Of several for one kind, the last that measured a key counts.
2. Nodes whose key no profile of the kind has keep their estimate; a block is called measured if all its nodes are.
3. Where a profile has an estimate only, that takes the roofline's place and the node stays estimated.
4. A profile for a kind that the cluster does not have is refused, and so are profiles that match no node at all: the
   batch size or the model is another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from hetpipe_compiler.errors import ClusterError
from hetpipe_compiler.ir.config_file import suggestion
from hetpipe_compiler.ir.costs import GradientSum, NodeCost
from hetpipe_compiler.ir.profile_file import Operator, Profile, load_profile, merged
from hetpipe_compiler.passes.base import Compilation, Pass


@dataclass(frozen=True)
class ApplyProfile(Pass):
    """See the module's rules; ``profiles`` are what `load_profiles` read from ``paths``."""

    name: ClassVar[str] = "apply_profile"
    requires: ClassVar[tuple[str, ...]] = ("costs",)
    ensures: ClassVar[tuple[str, ...]] = ("costs",)

    paths: tuple[Path, ...] = ()
    profiles: tuple[Profile, ...] = ()

    def run(self, compilation: Compilation) -> None:
        assert compilation.costs is not None
        compilation.costs = apply_profiles(compilation.costs, self.profiles)
        compilation.runs = tuple(dict.fromkeys(profile.run for profile in self.profiles if profile.run is not None))
        if self.profiles and not any(cost.measured for cost in compilation.costs.values()):
            raise ClusterError(
                "HP235",
                f"matches none of the model's {len(compilation.costs)} nodes",
                where=", ".join(map(str, self.paths)),
                hint="run hetpipe-profile on this model.py with the same --set values",
            )

    def dump(self, compilation: Compilation) -> str:
        assert compilation.costs is not None
        rows = [f"{'node':40} measured on"]
        rows += [f"{name:40} {' '.join(cost.measured) or '-'}" for name, cost in compilation.costs.items()]
        return "\n".join(rows)


def load_profiles(paths: Sequence[Path], kinds: Sequence[str]) -> list[Profile]:
    """Read profiles. Raises `ClusterError` HP230-HP231, and HP234 for a kind that is not among ``kinds``."""
    profiles = []
    for path in paths:
        profile = load_profile(path)
        if profile.kind not in kinds:
            raise ClusterError(
                "HP234",
                f"is of kind '{profile.kind}', which the cluster does not have",
                where=str(path),
                hint=suggestion(profile.kind, kinds),
            )
        profiles.append(profile)
    return profiles


def apply_profiles(costs: Mapping[str, NodeCost], profiles: Sequence[Profile]) -> dict[str, NodeCost]:
    """Costs with the times of profiles filled in."""
    kinds = merged(profiles)
    return {name: _with(cost, kinds) for name, cost in costs.items()}


def _with(cost: NodeCost, kinds: Mapping[str, Mapping[str, Operator]]) -> NodeCost:
    measured: dict[str, tuple[float, float]] = {}
    scaled: dict[str, tuple[float, float]] = {}
    for kind, operators in kinds.items():
        times = operators.get(cost.key)
        if times is not None and times.forward_ms is not None and times.backward_ms is not None:
            into = scaled if times.estimated else measured
            into[kind] = (times.forward_ms, times.backward_ms)
    return replace(
        cost,
        measured={**cost.measured, **measured},
        scaled={**cost.scaled, **scaled},
        sums=tuple(_sum_with(addition, kinds) for addition in cost.sums),
    )


def _sum_with(addition: GradientSum, kinds: Mapping[str, Mapping[str, Operator]]) -> GradientSum:
    found = {kind: operators.get(addition.key) for kind, operators in kinds.items()}
    known = {kind: times.forward_ms for kind, times in found.items() if times and times.forward_ms is not None}
    return replace(addition, profiled_ms={**addition.profiled_ms, **known})
