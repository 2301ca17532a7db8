"""What became of faults: the registry of their kinds, and the outcome of each."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benches import Ended

WRONG, LOST, UNCLEAR = "wrong results", "lost stages", "unclear errors"


class Skip(Exception):
    """This machine can't have such a fault; the text says why."""


@dataclass
class Outcome:
    """Of the faults of one case. A complaint is one of WRONG, LOST, UNCLEAR, and what was seen."""

    faults: int = 1
    recovered: int = 0  # after them the same command gave the hashes of an undisturbed run
    clear: int = 0  # errors that name what is wrong
    seconds: float = 0.0  # that the case took
    complaints: list[tuple[str, str]] = field(default_factory=list)

    def complain(self, what: str, texts: Iterable[str]) -> None:
        """One complaint about all of `texts`, if there are any."""
        if found := list(texts):
            self.complaints.append((what, "; ".join(found)))

    def told(self, text: str, *words: str) -> None:
        """The run ended with an error: ours, in words that say what to do, each of `words` among them."""
        missing = [word for word in words if word not in text]
        if "Traceback" in text or "error:" not in text.lower() or missing:
            self.complain(UNCLEAR, [f"without {missing}: {text[-1500:]}"])
        else:
            self.clear += 1

    def ended_well(self, ended: "Ended", what: str = "") -> None:
        """A command that the faults must not keep from its end: an error of it, of `what`, is a wrong result."""
        self.complain(WRONG, [what + ended.text[-1500:]] if ended.status else [])

    def same(self, differences: list[str]) -> None:
        """After the faults everything is as if they had not been, or `differences` names files."""
        self.complain(WRONG, differences)
        if not differences:
            self.recovered = self.faults


Case = Callable[[Any, Random, int], Outcome]  # (lane, random numbers, number of the case)


@dataclass(frozen=True)
class Kind:
    """A kind of fault: `cases` of a full run, `sample` of a short one, each with `faults` faults."""

    name: str
    run: Case
    cases: int
    sample: int
    faults: int


KINDS: dict[str, Kind] = {}


def kind(name: str, *, cases: int, sample: int, faults: int = 1) -> Callable[[Case], Case]:
    """Register a case function."""

    def register(run: Case) -> Case:
        KINDS[name] = Kind(name, run, cases, sample, faults)
        return run

    return register
