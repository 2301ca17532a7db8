"""Results in an object store: no job sees more than what its rule declares, and all is the same as in files.

The store is a local S3 server. Snakemake removes a job's copies when it is done, so the next one begins without.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from workflow_runs import REPOSITORY, S3_KEYS, Bench, s3_server

pytestmark = pytest.mark.workflow

PROFILE = REPOSITORY / "workflow" / "profiles" / "s3"
PREFIX = ("--default-storage-prefix", "s3://bucket/folder")
STORE = ("--default-storage-provider", "s3", *PREFIX)


@pytest.fixture
def store(bench: Bench) -> Iterator[Bench]:
    """A bench with one chain, whose Snakemake finds a server with an empty store."""
    with s3_server() as bench.environment:
        bench.write_config(seeds=[0])
        yield bench


def fetch(bench: Bench, folder: Path) -> Bench:
    """All that is in the store, as a bench in `folder`."""
    import boto3

    client = boto3.resource(
        "s3",
        endpoint_url=bench.environment["SNAKEMAKE_STORAGE_S3_ENDPOINT_URL"],
        aws_access_key_id=S3_KEYS["ACCESS_KEY"],
        aws_secret_access_key=S3_KEYS["SECRET_KEY"],
        region_name="us-east-1",
    )
    for item in client.Bucket("bucket").objects.all():
        path = folder / Path(item.key).relative_to("folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        item.Object().download_file(str(path))
    return Bench(folder, bench.python, bench.config)


@pytest.mark.parametrize("per_job", [1, 2], ids=["single jobs", "jobs of several iterations"])
def test_the_store_has_what_files_would_have(
    store: Bench, finished: Bench, tmp_path: Path, per_job: int
) -> None:
    store.write_config(seeds=[0], iterations_per_job=per_job)
    store.snakemake("--workflow-profile", str(PROFILE), *PREFIX, "--cores", "2")
    stored = fetch(store, tmp_path / "fetched").hashes()
    chain = {name: value for name, value in finished.hashes().items() if name.startswith("tiny/main/seed-0/")}
    assert chain == {name: value for name, value in stored.items() if name.startswith("tiny/main/")}
    assert {"tiny/report/report.html", "tiny/report/summary.csv"} <= stored.keys()
    shared = {name for name in stored if name.startswith("shared/")}
    assert {stored[name] for name in shared} <= set(finished.hashes().values())
    # here lies only what belongs to the machine
    kept = {path.name for path in store.results.rglob("*") if path.is_file()}
    assert kept <= {".home.json", ".makers.json", ".run.lock", "jobs.json"}
    if per_job == 1:
        assert store.planned(*STORE) == set()
        store.write_config(seeds=[0], evaluation={"every": 1})
        rules = {job.split(" variant")[0] for job in store.planned(*STORE)}
        assert rules == {"evaluate", "export", "report", "track", "variant_config"}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"stop_at": {"metric": "eval/success_rate", "value": 0.9}},
            "stop_at: the policies of a stopped chain",
        ),
        (
            {"results": "/somewhere/else"},
            "results: in an object store this is a folder below the storage prefix",
        ),
    ],
)
def test_what_a_store_cannot_hold_is_refused(store: Bench, changes: dict, told: str) -> None:
    store.write_config(**changes)
    done = store.snakemake("-n", "--workflow-profile", "none", *STORE, check=False)
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_llmppo_run_says_who_does_it(store: Bench) -> None:
    done = store.llmppo("run", "--profile", "s3", check=False)
    assert done.returncode == 1
    assert "snakemake --workflow-profile" in done.stderr
