"""kill -9 of the run's own vLLM server: while it starts, while it generates, between two stages.

One reply at a time and without a cache of prefixes, since vLLM's last bits depend on what is decoded together.
"""

import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random

import psutil
import yaml
from benches import CONFIG, Bench, Lane, Stage, stages_of, wait_until
from outcomes import LOST, UNCLEAR, WRONG, Outcome, Skip, kind

SERVER = "llmppo.engines.vllm_server"
SERVED = {
    "base_model": {"hidden_size": 64, "intermediate_size": 64},  # heads of 32: vLLM has no smaller ones
    "rollout": {"vllm": {"mode": "server", "max_num_seqs": 1, "enable_prefix_caching": False}},
}
STARTING, GENERATING, BETWEEN = range(3)


class ServedBench(Bench):
    """The chaos experiment with vLLM."""

    def empty(self) -> None:
        super().empty()
        config = yaml.safe_load((self.folder / CONFIG).read_text())
        for section, values in SERVED.items():
            config[section] |= values
        (self.folder / CONFIG).write_text(yaml.safe_dump(config))

    def server(self) -> psutil.Process | None:
        return next((p for p in self.processes() if SERVER in p.cmdline()), None)


@cache
def prepared(folder: Path) -> tuple[ServedBench, Stage, float, float]:
    """A bench below `folder`, a sampling stage, and the seconds it takes to start a server, and to ask one."""
    undisturbed = ServedBench(folder / "vllm-undisturbed")
    undisturbed.empty()
    ended = undisturbed.run()
    assert ended.status == 0, ended.text
    bench = ServedBench(folder / "vllm", undisturbed)
    stage = next(
        s for s in stages_of(undisturbed) if s.rule == "rollout" and "iterations/0003" in s.outputs[0]
    )
    took = []
    for _ in range(2):
        bench.without(stage)
        started = time.monotonic()
        ended = bench.do(stage)
        took.append(time.monotonic() - started)
        assert ended.status == 0, ended.text
        assert not bench.differences(), bench.differences()
    return bench, stage, took[0] - took[1], took[1]


@kind("kill -9 of the vLLM server", cases=6, sample=0)
def killed_server(lane: Lane, rng: Random, number: int) -> Outcome:
    if find_spec("vllm") is None:
        raise Skip("vLLM isn't installed: make vllm")
    outcome = Outcome()
    bench, stage, starting_s, asking_s = prepared(lane.bench.folder.parent)
    when = number % 3
    server = bench.server()
    if when != GENERATING and server is not None:
        server.kill()
        server.wait()
    bench.without(stage)
    if when == GENERATING and server is None:
        outcome.ended_well(bench.do(stage))
        bench.without(stage)
    before = bench.others(stage)
    if when != BETWEEN:
        child = bench.start(stage)
        hit = wait_until(lambda: child.poll() is not None or bench.server(), 60)
        assert isinstance(hit, psutil.Process)
        wait_until(
            lambda: child.poll() is not None, rng.uniform(0, starting_s if when == STARTING else asking_s)
        )
        parts = [hit, *hit.children(recursive=True)]
        hit.kill()
        ended = bench.end(stage, child)
        if ended.status:  # a stage that had not asked yet has started another server
            outcome.told(ended.text, "vLLM server")
        if psutil.wait_procs(parts, 30)[1]:
            outcome.complain(UNCLEAR, ["parts of the server outlive it"])
        outcome.complain(LOST, bench.lost(before))
        outcome.complain(WRONG, bench.altered())
    outcome.ended_well(bench.do(stage))
    outcome.complain(LOST, bench.lost(before))
    outcome.same(bench.differences())
    return outcome
