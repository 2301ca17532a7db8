"""The Kubernetes profile without a cluster: its manifests against Kubernetes' schemas, and a run whose `kubectl` starts
the command of a Job as a process here. What a real cluster would schedule, mount or refuse isn't tested.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from workflow_runs import REPOSITORY, Bench

PROFILE = REPOSITORY / "workflow" / "profiles" / "kubernetes"
VERSION = "1.32.4"

pytestmark = [
    pytest.mark.workflow,
    pytest.mark.skipif(
        find_spec("snakemake_executor_plugin_cluster_generic") is None
        or find_spec("kubernetes_validate") is None,
        reason="packages of requirements-kubernetes.lock are not installed: make kubernetes",
    ),
]

# Keeps a Job's manifest, its command's process and its exit status in files; `delete` is never reached.
KUBECTL = """\
#!/usr/bin/env python3
import json, subprocess, sys, yaml
from pathlib import Path

jobs = Path({jobs!r})
if sys.argv[1] == "create":
    manifest = yaml.safe_load(sys.stdin)
    name = manifest["metadata"]["generateName"] + str(len(list(jobs.glob("*.json"))))
    (jobs / f"{{name}}.json").write_text(json.dumps(manifest))
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    shell = '"$@"; echo $? > "$0"'
    subprocess.Popen(
        ["sh", "-c", shell, jobs / f"{{name}}.status", *container["command"]], cwd=container["workingDir"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    print(name)
else:
    assert sys.argv[1:3] == ["get", "job"]
    status = jobs / f"{{sys.argv[3]}}.status"
    text = status.read_text() if status.exists() else ""
    print({{"": "", "0\\n": "SuccessCriteriaMet Complete"}}.get(text, "FailureTarget Failed"))
"""


@pytest.fixture
def jobs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the manifests of jobs that a run has made."""
    folder, commands = bench.folder / "jobs", bench.folder / "commands"
    folder.mkdir()
    commands.mkdir()
    (commands / "kubectl").write_text(KUBECTL.format(jobs=str(folder)))
    (commands / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(commands), os.environ["PATH"]]))
    return folder


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def check(manifest: dict[str, Any]) -> None:
    import kubernetes_validate

    kubernetes_validate.validate(manifest, VERSION, strict=True)


@pytest.mark.parametrize("name", ["cluster.yaml", "run.yaml"])
def test_manifests_fit_the_schemas(name: str) -> None:
    for manifest in documents(PROFILE / name):
        check(manifest)


def test_the_image_has_the_kubectl_that_manifests_are_checked_for() -> None:
    assert f"/v{VERSION}/" in (REPOSITORY / "Containerfile").read_text()


def test_stages_run_as_jobs_that_ask_for_what_the_config_says(bench: Bench, jobs: Path) -> None:
    bench.write_config(
        seeds=[0],
        iterations=1,
        resources={"rollout": {"gpus": 2, "mem_mb": 3000, "runtime": 5}, "update": {"threads": 3}},
    )
    bench.snakemake(
        "--workflow-profile", str(PROFILE), "--seconds-between-status-checks", "1", "--latency-wait", "5"
    )
    assert (bench.results / "tiny" / "report" / "report.html").is_file()

    made = {path.stem: json.loads(path.read_text()) for path in jobs.glob("*.json")}
    for manifest in made.values():
        check(manifest)
    rules = [manifest["metadata"]["labels"]["rule"] for manifest in made.values()]
    assert {rule: rules.count(rule) for rule in ("rollout", "update", "variant-config")} == {
        "rollout": 2,
        "update": 1,
        "variant-config": 0,
    }
    asked = {
        rule: (
            job["spec"]["activeDeadlineSeconds"],
            container["resources"]["requests"],
            container["resources"]["limits"],
        )
        for job in made.values()
        for rule in [job["metadata"]["labels"]["rule"]]
        for container in job["spec"]["template"]["spec"]["containers"]
    }
    assert asked["rollout"] == (
        300,
        {"cpu": "1", "memory": "3000M", "nvidia.com/gpu": "2"},
        {"memory": "3000M", "nvidia.com/gpu": "2"},
    )
    assert asked["update"][1] == {"cpu": "3", "memory": "2000M", "nvidia.com/gpu": "0"}


def test_a_failed_job_fails_the_run(bench: Bench, jobs: Path) -> None:
    bench.write_config(seeds=[0], iterations=1)
    done = bench.snakemake(
        "--workflow-profile", str(PROFILE), "--seconds-between-status-checks", "1", "--retries", "0",
        check=False, FAKE_STAGE_FAILS="base_model:None",
    )  # fmt: skip
    assert done.returncode == 1
    assert "Error in rule base_model" in done.stdout + done.stderr
