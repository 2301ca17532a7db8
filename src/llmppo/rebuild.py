"""What makes a damaged file again: what to delete, and which file to ask `llmppo run` for by name.

By name, because Snakemake leaves alone what no job needs any more, such as the rollouts of a finished update.
And with the policies on the way, because older ones were pruned: back to the last one that can be trained on.
"""

import re
from pathlib import Path

from llmppo.files import MANIFEST
from llmppo.plan import Plan
from llmppo.policies import is_whole

OF_ITERATION = re.compile(r"/(policy|iterations|evaluations)/(\d{4,})(?:/|$)")


def way_back(plan: Plan, damaged: Path) -> tuple[list[str], str]:
    """Paths to delete, and the file to ask for, so that `damaged` (a file, or a folder with a manifest) is made again."""
    folder = damaged.is_dir()
    delete, target = [str(damaged)], str(damaged / MANIFEST if folder else damaged)
    found = OF_ITERATION.search(str(damaged))
    if found is None:
        return delete, target
    kind, iteration = found[1], int(found[2])
    chain = Path(str(damaged)[: found.start()])
    trains = kind == "policy" or (kind == "iterations" and "rollouts" not in damaged.parts)
    needed = iteration if kind == "evaluations" else _start(plan, iteration)
    if kind == "iterations" and needed < iteration - 1:  # a job of several iterations makes it
        trains = True
    while needed > 0 and not is_whole(policy := chain / "policy" / f"{needed:04d}", trains):
        delete.append(str(policy))
        needed, trains = _start(plan, needed), True
    return delete, target


def _start(plan: Plan, iteration: int) -> int:
    """The policy that the job of an iteration starts from."""
    return next((job[0] for job in plan.jobs if iteration in job), iteration) - 1
