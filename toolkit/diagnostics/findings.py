"""What doctor reports: checks by name, what each saw, and findings with what to change."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

# In the order in which they are shown.
CHECKS = {
    "runs": "the recipe runs",
    "finite": "losses and gradients are finite",
    "split": "the gradient is the same for every split of the global batch",
    "alone": "an example has the gradient together with others that it has alone",
    "direction": "the first update prefers what the rows or rewards prefer",
    "tokens": "micro-batches have the tokens of their rows",
    "masks": "supervised are the tokens that the data say",
    "shift": "labels are shifted once",
    "spans": "answers in a context begin and end where the data say",
    "ends": "texts begin and end as the tokenizer says, and the end is learned",
    "padding": "padding is on the right, unseen and unsupervised",
    "rates": "the configured learning rates reach the parameters",
    "trained": "trainable parameters are trained, frozen ones do not move",
    "decay": "weight decay is on matrices alone",
    "clipping": "gradients are clipped as configured",
    "cleared": "gradients are cleared after each step",
    "modes": "dropout is on in training and off in evaluation",
    "evaluation": "evaluation does not depend on its batch size",
    "start": "the loss at the start is that of guessing",
    "overfit": "eight examples can be learned by heart",
    "saved": "the saved model gives the logits of the trained one",
    "stops": "generation of the saved model stops where answers end",
    "resume": "a resumed run ends with the same bits",
    "types": "numbers have the types that were set",
    "tokenizer": "tokenizer and model agree",
    "leak": "held-out examples are not in the training data",
}


@dataclass(frozen=True)
class Finding:
    """A mistake: what was seen, what to change, and where in the recipe (FILE:LINE), where that is known."""

    check: str
    what: str
    change: str
    where: str = ""


@dataclass
class Outcome:
    """What a check saw. `note`: the measured numbers, or why it could not look; `looked`: whether it could."""

    note: str = ""
    looked: bool = True
    findings: list[Finding] = field(default_factory=list)

    @property
    def state(self) -> str:
        """ "finding", "ok", or "skipped" where there was nothing to look at."""
        return "finding" if self.findings else "ok" if self.looked else "skipped"


def skipped(why: str) -> Outcome:
    """A check that could not look."""
    return Outcome(why, looked=False)


def found(note: str, *findings: Finding | None) -> Outcome:
    """A check that looked; None: nothing was found."""
    return Outcome(note, findings=[finding for finding in findings if finding is not None])


@dataclass
class Report:
    """All outcomes, by the names of CHECKS."""

    recipe: str
    model: str = ""
    seconds: float = 0.0
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def findings(self) -> list[Finding]:
        """Those of all checks, in their order; none twice."""
        return list(
            dict.fromkeys(finding for name in CHECKS if name in self.outcomes for finding in self.outcomes[name].findings)
        )

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        checks = [
            {"check": name, "asks": CHECKS[name], "state": outcome.state, "note": outcome.note}
            for name in CHECKS if (outcome := self.outcomes.get(name))
        ]  # fmt: skip
        return {
            "recipe": self.recipe, "model": self.model, "seconds": round(self.seconds, 1),
            "findings": [asdict(finding) for finding in self.findings], "checks": checks,
        }  # fmt: skip
