"""A rule that keeps a model's meaning, and the test that misses it when it is taken out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import models
from removal import Removal

_STAGES = "codegen/test_model_kinds.py::test_stages_compute_what_the_model_computes[{}]"
_REFUSED = "codegen/test_model_kinds.py::test_what_cannot_be_kept_is_refused_at_its_line[{}]"


@dataclass(frozen=True)
class Row:
    """One rule.

    Attributes:
        trouble: What would go wrong.
        named: The test, below ``tests``; or a model of `models`: the test that its stages compute the same, or that it
            is refused at its line.
        function: Where the rule is: ``module:function`` or ``module:Class.method`` of the package.
        rule: Its text, as it stands there.
        instead: What stands there without it; None: nothing, or, for a condition, that it never holds.
        sees: A pattern in what the test then says; a refusal that does not come is what a refused model's test says.
        times: How often the text stands there.
        in_children: The rule is at work in processes that the test starts.
        cases: The troubles of ../shared/cases.md, which users of such systems reported, that it stands against.
    """

    trouble: str
    named: str
    function: str
    rule: str
    instead: str | None = None
    sees: str | None = None
    times: int = 1
    in_children: bool = False
    cases: str = ""

    @property
    def test(self) -> str:
        """The id of the test."""
        if self.named in models.KINDS:
            return _STAGES.format(self.named)
        return _REFUSED.format(self.named) if self.named in models.REFUSED else self.named

    @property
    def pattern(self) -> str:
        """What the test must say without the rule."""
        if self.sees is not None:
            return self.sees
        return "DID NOT RAISE" if self.named in models.REFUSED else ""

    @cached_property
    def removal(self) -> Removal:
        """How the rule goes."""
        instead = self.instead
        if instead is None:
            instead = "if False:" if self.rule.startswith("if ") and self.rule.endswith(":") else ""
        return Removal(f"hetpipe_compiler.{self.function}", self.rule, instead, self.times)
