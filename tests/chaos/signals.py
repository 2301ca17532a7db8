"""SIGTERM, the polite end of a cluster's job: everything ends within ten seconds, and the same command goes on."""

import time
from random import Random

from benches import Lane, wait_until
from kills import LONGEST_S, STAGE, WORKER, victim
from outcomes import LOST, UNCLEAR, WRONG, Outcome, kind

SIGNALS = 4  # to one whole run
WITHIN_S = 10.0
STOPPED = 143


@kind("SIGTERM to a run", cases=4, sample=1, faults=SIGNALS)
def stopped_run(lane: Lane, rng: Random, number: int) -> Outcome:
    bench, outcome, sent = lane.runs, Outcome(SIGNALS), 0
    bench.empty()
    before: dict[str, tuple[int, int]] = {}
    while sent < SIGNALS:
        run = bench.start_run()
        wait_until(lambda: "Snakemake's log" in bench.said(), 60)
        wait_until(lambda run=run: run.poll() is not None, rng.uniform(0, LONGEST_S))
        if run.poll() is not None:
            outcome.complain(WRONG, bench.differences())
            bench.empty()
            before = {}
            continue
        asked = time.monotonic()
        run.terminate()
        ended = bench.end_run(run)
        sent += 1
        wait_until(lambda: not bench.processes(), WITHIN_S)
        took = time.monotonic() - asked
        if took > WITHIN_S or ended.status not in (0, STOPPED) or "Traceback" in ended.text:
            outcome.complain(UNCLEAR, [f"{took:.0f} s, status {ended.status}: {ended.text[-1500:]}"])
        outcome.complain(LOST, bench.lost(before))
        before = bench.done(lane.stages)
    again = bench.run()
    outcome.complain(LOST, bench.lost(before))
    outcome.ended_well(again)
    outcome.same(bench.differences())
    return outcome


@kind("SIGTERM to a stage or the worker", cases=14, sample=1)
def stopped_stage(lane: Lane, rng: Random, number: int) -> Outcome:
    bench, outcome = lane.bench, Outcome()
    stage = rng.choice(lane.repeatable)
    bench.without(stage)
    before = bench.others(stage)
    child = bench.start(stage)
    time.sleep(rng.uniform(0, lane.seconds[stage.name]))
    target = rng.choice((STAGE, STAGE, WORKER))
    (victim(bench, target, rng) or child).terminate()
    asked = time.monotonic()
    bench.end(stage, child)
    took = time.monotonic() - asked
    if target == STAGE and took > WITHIN_S:  # without its worker a stage starts cold
        outcome.complain(UNCLEAR, [f"{stage.name} took {took:.0f} s to end"])
    outcome.complain(LOST, bench.lost(before))
    outcome.complain(WRONG, bench.altered())
    bench.do(stage)
    outcome.same(bench.differences())
    return outcome
