"""Two runs on one results folder: one of them works, the other one is told by whom it is in use."""

import shutil
import subprocess
import sys
import time
from random import Random

from benches import BIN, CONFIG, REPOSITORY, TASK, Lane, wait
from outcomes import LOST, UNCLEAR, Outcome, kind

RUN = [str(BIN / "llmppo"), "run", "--config", CONFIG, "--cores", "1"]
PLAIN = [
    *(
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(REPOSITORY / "Snakefile"),
        "--configfile",
        CONFIG,
    ),
    *("--cores", "1", "--nolock", "--workflow-profile", "none"),
]


@kind("two runs on one results folder", cases=10, sample=1)
def two_runs(lane: Lane, rng: Random, number: int) -> Outcome:
    """Both start at nearly the same time, with the export, the report and the tracker left to do."""
    bench, outcome = lane.bench, Outcome()
    bench.finished()
    left = [stage for stage in lane.stages if stage.rule in ("export", "report", "track")]
    for stage in left:
        bench.drop(stage)
    files = {name for stage in lane.stages if stage not in left for name in stage.outputs}
    before = bench.stamps(files)
    elsewhere = bench.folder / "elsewhere"
    elsewhere.mkdir()
    for name in (CONFIG, TASK):
        shutil.copy(bench.folder / name, elsewhere)
    first = (RUN, bench.folder)
    second = rng.choice((first, (PLAIN, bench.folder), ([*RUN, "--results", str(bench.results)], elsewhere)))
    children = []
    for command, folder in rng.sample((first, second), 2):
        env = {**bench.environment(), "LLMPPO_WORKER": str(bench.folder / "worker-of-run.log")}
        said = bench.folder / f"said-{len(children)}"
        with open(said, "wb") as output:
            child = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT)
        children.append(child)
        time.sleep(rng.uniform(0, 1.5))
    statuses = [wait(child, 240) for child in children]
    texts = [(bench.folder / f"said-{n}").read_text(errors="replace") for n in range(2)]
    refused = [text for text, status in zip(texts, statuses, strict=True) if status]
    if len(refused) == 1 and ("in use by" in refused[0] or "was made from" in refused[0]):
        outcome.clear = 1
    else:
        outcome.complain(UNCLEAR, [f"{statuses}: {texts}"])
    outcome.complain(LOST, bench.lost(before))
    again = bench.run()
    outcome.ended_well(again)
    outcome.same(bench.differences())
    return outcome
