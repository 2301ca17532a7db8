"""kill -9 at random times: of the run, of a stage, of the worker; in whole runs and in single stages."""

import time
from functools import partial
from random import Random

import psutil
from benches import Bench, Lane, is_worker, wait_until
from outcomes import LOST, UNCLEAR, WRONG, Outcome, kind

KILLS = 5  # of one whole run
LONGEST_S = 14.0  # from a start to a kill, about what a run takes
RUN, STAGE, WORKER = "the run", "a stage", "the worker"


def victim(bench: Bench, target: str, rng: Random) -> psutil.Process | None:
    """A process of the bench of the kind to be killed, if there is one."""
    found = []
    for process in bench.processes():
        try:
            words, parent = process.cmdline(), process.parent()
            forked = is_worker(process) and parent is not None and is_worker(parent)
        except psutil.Error:
            continue
        role = None
        if forked or "--settings" in words:
            role = STAGE
        elif is_worker(process):
            role = WORKER
        elif "snakemake" in words or "run" in words:
            role = RUN
        if role == target:
            found.append(process)
    return rng.choice(found) if found else None


def killed_run(target: str, lane: Lane, rng: Random, number: int) -> Outcome:
    """A run whose `target` is killed again and again; then it may end."""
    bench, outcome, injected = lane.runs, Outcome(KILLS), 0
    bench.empty()
    run, before = None, {}
    while injected < KILLS:
        run = run or bench.start_run()
        wait_until(lambda run=run: run.poll() is not None, rng.uniform(0.5, LONGEST_S))
        hit = wait_until(lambda run=run: run.poll() is not None or victim(bench, target, rng), 30)
        if not isinstance(hit, psutil.Process):  # it was done before
            finish(bench, bench.end_run(run).status, before, outcome)
            bench.empty()
            run, before = None, {}
            continue
        hit.kill()
        injected += 1
        if target != WORKER:
            bench.end_run(run)
            run = None
            if not wait_until(lambda: not bench.processes(), 30):
                outcome.complain(UNCLEAR, [f"still at work: {[p.cmdline()[:6] for p in bench.processes()]}"])
            outcome.complain(LOST, bench.lost(before))
            before = bench.done(lane.stages)
    finish(bench, bench.end_run(run or bench.start_run()).status, before, outcome)
    return outcome


def finish(bench: Bench, status: int, before: dict[str, tuple[int, int]], outcome: Outcome) -> None:
    outcome.complain(LOST, bench.lost(before))
    if status:
        outcome.complain(WRONG, [f"the same command ended with status {status}: {bench.said()}"])
    outcome.same(bench.differences())


def killed_stage(target: str, lane: Lane, rng: Random, number: int) -> Outcome:
    """One stage after the other, called as by Snakemake, loses `target` at a random time."""
    bench, outcome = lane.bench, Outcome()
    stage = lane.repeatable[number % len(lane.repeatable)]
    bench.without(stage)
    before = bench.others(stage)
    child = bench.start(stage)
    time.sleep(rng.uniform(0, lane.seconds[stage.name]))
    hit = victim(bench, target, rng)
    if hit is not None:
        hit.kill()
    ended = bench.end(stage, child)
    if target == WORKER and ended.status:
        outcome.complain(WRONG, [f"{stage.name} doesn't outlive its worker: {ended.text[-1500:]}"])
    outcome.complain(LOST, bench.lost(before))
    outcome.complain(WRONG, bench.altered())
    again = bench.do(stage)
    outcome.ended_well(again)
    outcome.same(bench.differences())
    return outcome


kind("kill -9 of snakemake", cases=10, sample=1, faults=KILLS)(partial(killed_run, RUN))
kind("kill -9 of a stage of a run", cases=2, sample=0, faults=KILLS)(partial(killed_run, STAGE))
kind("kill -9 of the worker of a run", cases=2, sample=0, faults=KILLS)(partial(killed_run, WORKER))
kind("kill -9 of a stage", cases=40, sample=7)(partial(killed_stage, STAGE))
kind("kill -9 of the worker", cases=40, sample=1)(partial(killed_stage, WORKER))
