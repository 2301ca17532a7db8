"""What the chains of an experiment were made with, kept with the results for `llmppo adopt`.

A run that is interrupted after an edit leaves files of both settings, and only Snakemake's notes tell which is which.
Those don't travel with the results, nor do the user's code and data. So each chain's makers (`Plan.maker`) are noted when jobs
start, and when a whole run has ended only the last one stays.
"""

from collections.abc import Iterator
from pathlib import Path

from llmppo.errors import LlmppoError
from llmppo.files import read_json, write_sealed
from llmppo.plan import Plan


def note_start(plan: Plan) -> None:
    """Jobs begin to make the chains of `plan`."""
    noted = _read(plan)
    _write(
        plan,
        noted,
        {name: [*(m for m in noted.get(name, []) if m != maker), maker] for name, maker in _makers(plan)},
    )


def note_end(plan: Plan) -> None:
    """All that `plan` wants is made, and with nothing else."""
    _write(plan, _read(plan), {name: [maker] for name, maker in _makers(plan)})


def require_one_maker(plan: Plan) -> None:
    """Raise LlmppoError where a chain holds files of other settings, or of other code or data, than those of `plan`."""
    noted = _read(plan)
    for name, maker in _makers(plan):
        known = noted.get(name, [maker])
        way_out = f"or delete {plan.layout.root}/{name} to make it anew"
        if len(known) > 1:
            raise LlmppoError(
                f"{name} was being made anew after an edit, and part of its files are those from before: end that run by "
                f"`llmppo run` where the results were made, and adopt then, {way_out}"
            )
        if known != [maker]:
            raise LlmppoError(
                f"{name} was made with other code of yours, or other data; adopt with what made it, then change it: what "
                f"depends on it runs again, {way_out}"
            )


def _makers(plan: Plan) -> Iterator[tuple[str, str]]:
    for variant, seed in plan.chains:
        yield f"{variant}/seed-{seed}", plan.maker(variant, seed)


def _read(plan: Plan) -> dict[str, list[str]]:
    """Makers by chain; a chain whose folder somebody has deleted begins anew."""
    path = Path(plan.layout.makers)
    if not path.is_file():
        return {}
    return {
        name: makers
        for name, makers in read_json(path).items()
        if isinstance(makers, list) and (path.parent / name).is_dir()
    }


def _write(plan: Plan, noted: dict[str, list[str]], makers: dict[str, list[str]]) -> None:
    if noted != noted | makers:
        write_sealed(plan.layout.makers, noted | makers)
