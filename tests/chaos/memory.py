"""Memory that runs out at a random moment of an update: the kernel grants its process no more."""

import resource
import time
from random import Random

import psutil
from benches import Lane, wait_until
from kills import STAGE, victim
from outcomes import LOST, WRONG, Outcome, kind

MB = 2**20


@kind("out of memory", cases=16, sample=2)
def out_of_memory(lane: Lane, rng: Random, number: int) -> Outcome:
    bench, outcome = lane.bench, Outcome()
    stage = rng.choice([stage for stage in lane.repeatable if stage.rule in ("update", "critic_warmup")])
    bench.without(stage)
    before = bench.others(stage)
    child = bench.start(stage)

    def forked() -> psutil.Process | None:
        found = victim(bench, STAGE, rng)
        return found if found is not None and found.pid != child.pid else None

    process = wait_until(lambda: child.poll() is not None or forked(), 60)
    if isinstance(process, psutil.Process):
        time.sleep(rng.uniform(0, lane.seconds[stage.name]))
        try:
            limit = process.memory_info().vms + rng.randrange(MB)
            resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
        except (psutil.Error, ProcessLookupError):
            pass  # it was done before
    ended = bench.end(stage, child)
    outcome.complain(LOST, bench.lost(before))
    outcome.complain(WRONG, bench.altered())
    if ended.status:
        outcome.told(ended.text, "the smallest change first", "micro_batch_size_per_gpu")
    bench.drop(stage)
    bench.do(stage)
    outcome.same(bench.differences())
    return outcome
