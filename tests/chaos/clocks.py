"""Clocks that go backwards: under a stage, and between two runs, whose older files then come from the future."""

import os
from dataclasses import replace
from random import Random

from benches import Lane
from outcomes import LOST, WRONG, Outcome, kind

DAY_S = 86_400
BACKWARDS = """
import itertools, time
real, calls = time.time, itertools.count()
time.time = lambda: real() - {seconds} * (next(calls) > {after})
from llmppo.cli import main
main(prog_name="llmppo")
"""


@kind("clock that goes backwards in a stage", cases=8, sample=1)
def in_a_stage(lane: Lane, rng: Random, number: int) -> Outcome:
    bench, outcome = lane.bench, Outcome()
    stage = rng.choice(lane.repeatable)
    bench.without(stage)
    script = bench.folder / "backwards.py"
    script.write_text(BACKWARDS.format(seconds=rng.randrange(1, 30 * DAY_S), after=rng.randrange(20)))
    command = stage.command.replace("exec llmppo ", f"exec python {script} ")
    ended = bench.do(replace(stage, command=command), LLMPPO_WORKER="off")
    outcome.ended_well(ended, f"{stage.name}: ")
    outcome.same(bench.differences())
    return outcome


@kind("clock that goes backwards between runs", cases=5, sample=1)
def between_runs(lane: Lane, rng: Random, number: int) -> Outcome:
    """The last stages run after what they read was written in the future; then nothing is left to do."""
    bench, outcome = lane.bench, Outcome()
    bench.finished()
    last = [stage for stage in lane.stages if stage.rule in ("evaluate", "export", "report", "track")]
    for stage in rng.sample(last, 3):
        bench.drop(stage)
    ahead = rng.randrange(60, 30 * DAY_S)
    for path in [*bench.folder.rglob("*")]:
        if path.is_file():
            status = path.stat()
            os.utime(path, (status.st_atime + ahead, status.st_mtime + ahead))
    before = bench.done([stage for stage in lane.stages if stage not in last])
    ended = bench.run()
    outcome.ended_well(ended)
    now = bench.stamps(before)  # the time of files from the future is set anew
    outcome.complain(LOST, [f"{name} was made again" for name in before if now[name][1] != before[name][1]])
    outcome.same(bench.differences())
    again = bench.run()
    if "nothing ran" not in again.text:
        outcome.complain(WRONG, [f"a second run has work to do: {again.text[-1500:]}"])
    return outcome
