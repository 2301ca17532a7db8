"""What must be equal in two results folders of the same experiment: all but clock readings."""

import hashlib
import json
from pathlib import Path
from typing import Any

from llmppo.files import read_json

# Pages, cards and the tracker show times; the rest may not depend on when or where a stage ran.
TIMED_FOLDERS = ("logs", "benchmarks", "report", "mlartifacts")
TIMED_FILES = ("mlflow.db", "tracking.json", "mlflow.html", ".run.lock", ".home.json", "README.md")


def without_times(path: Path) -> Any:
    """A metrics file less its clock readings, what the machine gave, and the checksum over them."""
    content = read_json(path)
    content.pop("finished_at")
    for metrics in (content.get("metrics", {}), *content.get("steps", [])):
        for name in [name for name in metrics if name.startswith(("time/", "perf/"))]:
            del metrics[name]
    return content


def result_hashes(results: Path) -> dict[str, str]:
    hashes = {}
    for path in sorted(results.rglob("*")):
        name = path.relative_to(results)
        if not path.is_file() or path.name in TIMED_FILES or set(name.parts) & set(TIMED_FOLDERS):
            continue
        if path.name == "metrics.json":
            content = json.dumps(without_times(path), sort_keys=True).encode()
        elif name.parts[-2:] == ("export", "manifest.json"):  # lists the card's hash
            content = json.dumps(sorted(json.loads(path.read_text())["files"])).encode()
        else:
            content = path.read_bytes()
        hashes[str(name)] = hashlib.sha256(content).hexdigest()
    return hashes
