"""The real `llmppo` command with fake stage bodies, for tests of the workflow's logic only.

A fake stage writes its declared outputs within milliseconds. Their content is a hash of its settings and of
the content of its inputs, so that equal hashes at the end mean an equal history. `FAKE_STAGE_SECONDS`
makes stages slow, `FAKE_STAGE_DEAF=1` lets them ignore an interrupt, `FAKE_STAGE_FAILS=update:2` lets
iteration 2's update fail.
"""

import json
import os
import signal
import sys
import time
import types
from pathlib import Path
from typing import Any

from llmppo import cli
from llmppo.errors import EnvironmentFault
from llmppo.files import MANIFEST, digest, write_json, write_text

FILES_BESIDE_OUT = {
    "report": ("rollouts.html", "summary.csv", "figures/learning_curve.png"),
    "track": ("mlflow.html",),
}
WEIGHTS = "weights"
FOLDERS = {"base_model", "dataset", "critic_warmup", "update", "evaluate", "export"}


def content(value: Any) -> Any:
    """What a stage can see of an option: the text of a file or of a folder with a manifest, else the value itself."""
    if isinstance(value, list | tuple):
        return [content(part) for part in value]
    if isinstance(value, Path):
        if (value / MANIFEST).is_file():
            return [(value / name).read_text() for name in (MANIFEST, WEIGHTS)]
        path = value
        if path.is_file():
            text = path.read_text()
            if path.name == "metrics.json":  # the time of writing is no result
                text = json.dumps({**json.loads(text), "finished_at": None})
            return text
        return value.name
    return value


def fake_run(stage: str, settings: dict[str, Any], **options: Any) -> str:
    print(f"fake {stage} with {sorted(options)}", flush=True)
    if os.environ.get("FAKE_STAGE_DEAF"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    time.sleep(float(os.environ.get("FAKE_STAGE_SECONDS", "0")))
    iteration = options.get("iteration")
    if os.environ.get("FAKE_STAGE_FAILS") == f"{stage}:{iteration}":
        raise EnvironmentFault("this fake stage was told to fail")
    options.pop("prune", None)  # what goes of older policies is no result
    outputs = {name: options.pop(name) for name in ("out", "metrics", "advantages") if name in options}
    threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    token = digest([stage, settings, threads, {name: content(value) for name, value in options.items()}])
    out = outputs["out"]
    if stage == "evaluate":
        for decoding in settings["evaluation"]["decoding"]:
            write_text(out / f"{decoding}.parquet", token)
        outputs["metrics"] = out / "metrics.json"
    elif stage == "dataset":
        write_text(out / "train.jsonl", token)
        write_text(out / "eval.jsonl", token)
    for name in FILES_BESIDE_OUT.get(stage, ()):
        write_text(out.parent / name, token)
    if "metrics" in outputs:
        share = 1 - 1 / (2 + (iteration or 0))
        values = {"rollout/reward_mean": share, "rollout/success_rate": share, "eval/success_rate": share}
        write_json(
            outputs["metrics"],
            {"iteration": iteration, "finished_at": time.time(), "metrics": values, "token": token},
        )
    if "advantages" in outputs:
        write_text(outputs["advantages"], token)
    if stage in FOLDERS:
        if stage != "evaluate":
            write_text(out / WEIGHTS, token)
            write_json(out / MANIFEST, {"files": {}})
    else:
        write_text(out, token)
    return f"fake {stage} done"


def install() -> None:
    """Put a fake module in the place of every stage but `iterations`, which calls two of them, and `variant-config`."""
    for command in cli.main.commands.keys() - {"iterations", "variant-config"}:
        stage = command.replace("-", "_")
        module = types.ModuleType(f"llmppo.stages.{stage}")
        module.run = lambda settings, stage=stage, **options: fake_run(stage, settings, **options)  # type: ignore[attr-defined]
        sys.modules[module.__name__] = module


if __name__ == "__main__":
    install()
    cli.main()
