"""The MLflow mirror of a chain: one run, brought up to date with the files and never ahead of them.

A chain has one current run, found by tags. Entries that the run already holds are skipped; if one of them has
changed since, a new run starts and the old one is tagged `superseded_by`, because MLflow can't replace values.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from llmppo.errors import no_room
from llmppo.files import digest, new_file, sha256_file
from llmppo.provenance import code_version, lock_hash
from llmppo.reporting.results import Chain
from llmppo.tracking.content import (
    Entry,
    chain_entries,
    chain_params,
    config_hash,
    is_complete,
    sample_table,
)

log = logging.getLogger(__name__)

METRICS_A_BATCH, PARAMS_A_BATCH, TAGS_A_BATCH = 1000, 100, 100  # MLflow's limits
DIGESTS_A_TAG = 200  # about 35 characters each; MLflow takes 8000 a tag
TABLE = "transcripts.json"

# A tracker that can't be reached must not hold up a pipeline; MLflow's own defaults wait for minutes.
PATIENCE = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
}


def sqlite_path(uri: str) -> Path | None:
    """The database file of a sqlite URI, or None for another kind of store."""
    parts = urlsplit(uri)
    return Path(unquote(parts.path)[1:]) if parts.scheme == "sqlite" and len(parts.path) > 1 else None


def connect(uri: str) -> Any:
    """A client of the store, with short time-outs and without telemetry."""
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    # It prints a traceback of every database error that it also raises.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    database = sqlite_path(uri)
    if database is not None and not database.exists():
        # MLflow can't go on with tables that were left half made, so they get their name when all are there.
        with new_file(database) as fresh:
            MlflowClient(tracking_uri=f"sqlite:///{fresh}").search_experiments(max_results=1)
    return MlflowClient(tracking_uri=uri)


def fills_disk_of(file: Path, uri: str, error: Exception) -> bool:
    """Whether a store on the disk of `file` has met its end: then that is full for the results too."""
    database = sqlite_path(uri)
    return (
        no_room(error)
        and database is not None
        and database.parent.exists()
        and database.parent.stat().st_dev == file.parent.stat().st_dev
    )


def initialise(uri: str) -> None:
    """Create the store's tables, alone: it takes seconds, which several processes would spend at once."""
    connect(uri).search_experiments(max_results=1)


def chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))


class Mirror:
    """One chain in one MLflow store."""

    def __init__(
        self, client: Any, uri: str, experiment: str, chain: Chain, config: Mapping[str, Any]
    ) -> None:
        self.client, self.uri, self.experiment = client, uri, experiment
        self.chain, self.config = chain, config
        self.name = f"{experiment}/{chain.variant}/{chain.seed}"
        self.key = f"{self.name}/{config_hash(config)}"
        self.run_id: str | None = None
        self.experiment_id: str | None = None
        self.tags: dict[str, str] = {}
        self.changed = False

    def update(self) -> int:
        """Bring the chain's run up to date; returns how many entries were new."""
        entries = chain_entries(self.chain)
        self._choose_run(entries)
        new = [entry for name, entry in entries.items() if name not in self._logged()]
        self._log_params()
        self._log_entries(new)
        self._tag(self._facts())
        self._log_artefacts()
        self._close(entries)
        return len(new)

    @property
    def page(self) -> str:
        """Where MLflow's UI shows the run, the part of the address after `#`."""
        return f"/experiments/{self.experiment_id}/runs/{self.run_id}"

    def fail(self) -> None:
        """Mark the run as failed, as far as the store still answers."""
        if self.run_id is not None:
            self.client.set_terminated(self.run_id, "FAILED")

    # --- the run

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        for last_try in (False, True):
            found = self.client.get_experiment_by_name(self.experiment)
            if found is not None:
                if found.lifecycle_stage == "deleted":
                    self.client.restore_experiment(found.experiment_id)
                return str(found.experiment_id)
            database = sqlite_path(self.uri)
            # An absolute location, so that the client and a server started elsewhere find the same files.
            root = database and (database.parent / "mlartifacts" / self.experiment).absolute().as_uri()
            try:
                return str(self.client.create_experiment(self.experiment, artifact_location=root))
            except MlflowException:
                if last_try:  # else another process created it in between
                    raise
        raise AssertionError("unreachable")

    def _choose_run(self, entries: Mapping[str, Entry]) -> None:
        """Take the newest run that agrees with the files, or start one; all others are superseded."""
        experiment_id = self.experiment_id = self._experiment_id()
        runs = self.client.search_runs(
            [experiment_id],
            filter_string=f"tags.`ppo.chain` = '{self.name}'",
            order_by=["attributes.start_time DESC", "attributes.run_id DESC"],
        )
        current = next((run for run in runs if self._agrees(run.data.tags, entries)), None)
        if current is None:
            stamps = [point.timestamp for entry in entries.values() for point in entry.points]
            tags = {"ppo.chain": self.name, "ppo.key": self.key}
            current = self.client.create_run(
                experiment_id,
                start_time=min(stamps, default=None),
                tags=tags,
                run_name=f"{self.chain.variant}/seed-{self.chain.seed}",
            )
            self.changed = True
        self.run_id, self.tags = current.info.run_id, dict(current.data.tags)
        self.status, self.params = current.info.status, dict(current.data.params)
        for run in runs:
            if run.info.run_id != self.run_id and "superseded_by" not in run.data.tags:
                self.client.set_tag(run.info.run_id, "superseded_by", self.run_id)

    def _agrees(self, tags: Mapping[str, str], entries: Mapping[str, Entry]) -> bool:
        """Whether a run is of this config and holds nothing that has changed since."""
        if "superseded_by" in tags or tags.get("ppo.key") != self.key:
            return False
        logged = digests_in(tags)
        return all(name not in entries or entries[name].digest == found for name, found in logged.items())

    # --- what it holds

    def _logged(self) -> dict[str, str]:
        return digests_in(self.tags)

    def _tag(self, values: Mapping[str, str]) -> None:
        """Set tags that are not set so already."""
        from mlflow.entities import RunTag

        fresh = {name: value for name, value in values.items() if self.tags.get(name) != value}
        for part in chunks(sorted(fresh.items()), TAGS_A_BATCH):
            self.client.log_batch(self.run_id, tags=[RunTag(name, value) for name, value in part])
        self.tags |= fresh
        self.changed |= bool(fresh)

    def _log_params(self) -> None:
        from mlflow.entities import Param

        fresh = [item for item in chain_params(self.config).items() if item[0] not in self.params]
        for part in chunks(fresh, PARAMS_A_BATCH):
            self.client.log_batch(self.run_id, params=[Param(name, value) for name, value in part])
            self.changed = True

    def _log_entries(self, entries: Sequence[Entry]) -> None:
        """Log points, then remember their entries: a crash in between repeats equal points, which adds none."""
        from mlflow.entities import Metric

        points = [point for entry in entries for point in entry.points]
        for part in chunks(points, METRICS_A_BATCH):
            metrics = [Metric(point.key, point.value, point.timestamp, point.step) for point in part]
            self.client.log_batch(self.run_id, metrics=metrics)
        known = {**self._logged(), **{entry.name: entry.digest for entry in entries}}
        self._tag(digest_tags(known))

    def _facts(self) -> dict[str, str]:
        """Tags about the run; the code version is that of the last job that logged something new."""
        facts = {
            "study": self.experiment,
            "variant": self.chain.variant,
            "seed": str(self.chain.seed),
            "ppo.key": self.key,
            "ppo.iterations": str(self.chain.last_iteration),
        }
        if self.config.get("replays"):
            facts["replays"] = str(self.config["replays"])
        if self.chain.stopped_at is not None:
            facts["ppo.stopped_at"] = str(self.chain.stopped_at)
        report = f"Report: [report.html](#{self.page}/artifacts/report/report.html)"
        facts["mlflow.note.content"] = "\n\n".join(filter(None, [self.config.get("description"), report]))
        if self.changed or "code_version" not in self.tags:
            facts |= {"code_version": code_version(), "lock_sha256": lock_hash() or "none"}
        return facts

    # --- artefacts

    def _log_artefacts(self) -> None:
        """Config, transcripts, report and export, each only when it differs from what was logged."""
        root = self.chain.folder
        report = root.parents[1] / "report"
        files = [
            (root / "config.yaml", None),
            (root / "export" / "README.md", "export"),
            *((path, "export/adapter") for path in sorted((root / "export" / "adapter").glob("*"))),
            (report / "report.html", "report"),
            (report / "figures" / "learning_curve.png", "report"),
        ]
        known = json.loads(self.tags.get("ppo.artefacts", "{}"))
        seen = dict(known)
        for path, place in files:
            name = f"{place}/{path.name}" if place else path.name
            if path.is_file() and known.get(name) != (content := sha256_file(path)[:12]):
                self.client.log_artifact(self.run_id, str(path), place)
                seen[name] = content
        decoding = ((self.config.get("evaluation") or {}).get("decoding") or ["greedy"])[0]
        table = sample_table(self.chain, decoding)
        if table is not None and known.get(TABLE) != (content := digest(table)):
            self.client.log_dict(self.run_id, table, TABLE)
            seen[TABLE] = content
            self._tag({"mlflow.loggedArtifacts": json.dumps([{"path": TABLE, "type": "table"}])})
        if seen != known:
            self._tag({"ppo.artefacts": json.dumps(seen, sort_keys=True)})

    def _close(self, entries: Mapping[str, Entry]) -> None:
        """FINISHED once the chain is; until then the run stays open."""
        wanted = "FINISHED" if is_complete(self.chain, self.config) else "RUNNING"
        if self.status == wanted and not (wanted == "FINISHED" and self.changed):
            return
        if wanted == "FINISHED":
            stamps = [point.timestamp for entry in entries.values() for point in entry.points]
            self.client.set_terminated(self.run_id, wanted, end_time=max(stamps, default=None))
        else:
            self.client.update_run(self.run_id, status=wanted)


def digests_in(tags: Mapping[str, str]) -> dict[str, str]:
    """Entry name to digest, from a run's tags."""
    found: dict[str, str] = {}
    for name, value in tags.items():
        if name.startswith("ppo.logged."):
            found |= json.loads(value)
    return found


def digest_tags(digests: Mapping[str, str]) -> dict[str, str]:
    """The inverse of `digests_in`: many digests a tag, so that the tags stay few and short."""
    parts = chunks(sorted(digests.items()), DIGESTS_A_TAG)
    return {
        f"ppo.logged.{number:03d}": json.dumps(dict(part), separators=(",", ":"))
        for number, part in enumerate(parts)
    }
