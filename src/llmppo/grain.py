"""Which iterations of a chain run as one job.

Snakemake remembers by which rule each file was made, and would make it again by another. So what a chain has
reached keeps the jobs that it was made by, which a record in the results names; `iterations_per_job` counts
from there on. The partition is one for all chains of an experiment.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from llmppo.files import read_json, write_sealed
from llmppo.layout import ChainLayout


@dataclass(frozen=True)
class Block:
    """Iterations that run as one job in chains of `variants`, whose batches have the same `shards`."""

    iterations: range
    shards: range
    variants: tuple[str, ...]

    @property
    def first(self) -> int:
        return self.iterations[0]

    @property
    def last(self) -> int:
        return self.iterations[-1]

    @property
    def span(self) -> str:
        """Its iterations in the name of a file."""
        return f"{self.first:04d}-{self.last:04d}"

    @property
    def name(self) -> str:
        """Name of its rule."""
        return f"iterations_{self.first:04d}_{self.last:04d}_by_{len(self.shards)}"


def partition(
    last: int, size: int, *, ends: Iterable[int] = (), reached: int = 0, cut: int | None = None
) -> list[range]:
    """Iterations 1 to `last` cut into jobs of `size` or, at the end, fewer.

    `ends` are the last iterations of recorded jobs; those that begin at an iteration some chain has `reached`
    stay, and what was reached without a record was made one by one. Multiples of `cut` end a job too.
    """
    jobs: list[range] = []
    begin = 1
    for end in sorted(ends):
        if begin > min(reached, last):
            break
        jobs.append(range(begin, end + 1))
        begin = end + 1
    while begin <= last:
        end = begin if begin <= reached else min(begin + size - 1, last)
        if cut is not None:
            end = min(end, -(-begin // cut) * cut)
        jobs.append(range(begin, end + 1))
        begin = end + 1
    return jobs


def reached(chains: Iterable[ChainLayout]) -> int:
    """The last iteration whose policy any of the chains has."""
    found = [0]
    for chain in chains:
        folder = Path(chain.policy(0)).parent
        names = os.listdir(folder) if folder.is_dir() else []
        found += [
            int(name) for name in names if name.isdigit() and (folder / name / "manifest.json").exists()
        ]
    return max(found)


def recorded(path: str) -> list[int]:
    """The last iteration of each job that earlier runs had; empty without a record. Raises ArtefactError."""
    return read_json(path)["last_iterations"] if os.path.exists(path) else []


def record(path: str, jobs: Iterable[range]) -> None:
    """Keep the partition for later runs; jobs of one iteration alone need no record."""
    ends = [job[-1] for job in jobs]
    if recorded(path) or ends != list(range(1, len(ends) + 1)):
        write_sealed(path, {"last_iterations": ends})
