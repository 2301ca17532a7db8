"""The MLflow mirror on a real sqlite store: right steps, no duplicates, and failures that cost nothing."""

import json
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from llmppo.config import ExperimentConfig
from llmppo.errors import LlmppoError
from llmppo.experiment import variant_config
from llmppo.files import read_json
from llmppo.layout import ui_command
from llmppo.reporting.results import load_chain
from llmppo.stage_settings import stage_settings
from llmppo.stages import mlflow_init, report, track
from llmppo.testing.results import game_config, write_chain, write_results
from llmppo.testing.servers import free_port, wait_for
from llmppo.tracking.content import MAX_PARAM, chain_entries, config_hash, flatten, legal
from llmppo.tracking.mirror import Mirror, connect, digest_tags, digests_in, initialise, sqlite_path
from llmppo.tracking.relocate import bring_artefacts_along


class Study:
    """A made-up experiment of one seed, its store, and the `track` stage on it."""

    def __init__(self, root: Path, store: Path, *, iterations: int = 4, reached: int | None = None) -> None:
        evaluation = {"every": 2, "episodes": 8, "decoding": ["sampled", "greedy"]}
        values = game_config(seeds=[0], iterations=iterations, evaluation=evaluation)
        cut = {} if reached is None else {("main", 0): reached}
        self.config, self.folder, _ = write_results(root, values, reached=cut)
        self.run_dir = self.folder / "main" / "seed-0"
        self.database = root / "mlflow.db"
        shutil.copyfile(store, self.database)
        self.uri = f"sqlite:///{self.database}"
        self.marker = self.run_dir / "tracking.json"

    def settings(self, config: ExperimentConfig | None = None) -> dict[str, Any]:
        return stage_settings(variant_config(config or self.config, "main"), "track")

    def track(self, **changes: Any) -> dict[str, Any]:
        options = {"experiment": self.config.name, "variant": "main", "seed": 0, "run_dir": self.run_dir}
        options |= {"uri": self.uri, "out": self.marker, **changes}
        settings = options.pop("settings", None) or self.settings()
        track.run(settings, **options)
        return json.loads(Path(options["out"]).read_text())

    def rows(self) -> list[tuple[str, str, int, float, int]]:
        """(run, metric, step, value, timestamp), straight from the database."""
        with sqlite3.connect(self.database) as store:
            return store.execute("select run_uuid, key, step, value, timestamp from metrics").fetchall()

    def metrics_file(self, iteration: int) -> Path:
        return self.run_dir / "iterations" / f"{iteration:04d}" / "metrics.json"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An initialised store; making its tables takes seconds, so tests start from a copy."""
    database = tmp_path_factory.mktemp("store") / "mlflow.db"
    initialise(f"sqlite:///{database}")
    return database


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory, store: Path) -> tuple[Study, dict[str, Any]]:
    """A study tracked once; tests that use it only read."""
    study = Study(tmp_path_factory.mktemp("tracked"), store)
    return study, study.track()


def test_every_metric_has_its_iteration_as_step_and_its_finish_time(
    tracked: tuple[Study, dict[str, Any]],
) -> None:
    study, marker = tracked
    assert marker["ok"] is True
    rows = {(key, step): (value, timestamp) for _, key, step, value, timestamp in study.rows()}
    for folder, steps in (("iterations", range(1, 5)), ("evaluations", (0, 2, 4))):
        for step in steps:
            content = json.loads((study.run_dir / folder / f"{step:04d}" / "metrics.json").read_text())
            for key, value in content["metrics"].items():
                if value is None:
                    assert (key, step) not in rows
                else:
                    assert rows[key, step] == (pytest.approx(value), round(content["finished_at"] * 1000))
    assert rows["warmup/explained_variance_after", 0][0] == pytest.approx(0.03)
    assert rows["warmup/critic/explained_variance", 1][0] == pytest.approx(-0.3)
    assert {step for key, step in rows if key == "eval/success_rate"} == {0, 2, 4}


def test_tags_params_and_artefacts_tell_where_the_run_comes_from(
    tracked: tuple[Study, dict[str, Any]],
) -> None:
    study, marker = tracked
    client = connect(study.uri)
    run = client.get_run(marker["run_id"])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "main/seed-0"
    assert run.data.tags["study"] == "guess-number"
    assert run.data.tags["seed"] == "0"
    assert run.data.tags["code_version"]
    assert run.data.tags["lock_sha256"]
    key = f"guess-number/main/0/{config_hash(study.settings()['config'])}"
    assert run.data.tags["ppo.key"] == marker["key"] == key
    assert run.data.params["ppo.update_epochs"] == "3"
    assert run.data.params["evaluation.decoding"] == '["sampled", "greedy"]'
    assert "iterations" not in run.data.params
    paths = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert paths == {"config.yaml", "transcripts.json", "export"}
    assert {file.path for file in client.list_artifacts(run.info.run_id, "export")} == {
        "export/README.md",
        "export/adapter",
    }
    assert str(study.database.parent / "mlartifacts") in run.info.artifact_uri


def test_a_copied_store_keeps_its_artefacts_in_its_own_folder(tmp_path: Path, store: Path) -> None:
    (tmp_path / "mlartifacts" / "old").mkdir(parents=True)
    study = Study(tmp_path / "mlartifacts" / "old", store, reached=2)
    run_id = study.track()["run_id"]
    new = tmp_path / "new place"
    shutil.copytree(study.database.parent, new)
    shutil.rmtree(study.database.parent)
    bring_artefacts_along(new / "mlflow.db")
    client = connect(f"sqlite:///{new}/mlflow.db")
    run = client.get_run(run_id)
    place = (new / "mlartifacts" / "guess-number").as_uri()
    assert run.info.artifact_uri == f"{place}/{run_id}/artifacts"
    assert client.get_experiment(run.info.experiment_id).artifact_location == place
    config = study.run_dir.relative_to(study.database.parent) / "config.yaml"
    downloaded = client.download_artifacts(run_id, "config.yaml")
    assert Path(downloaded).read_bytes() == (new / config).read_bytes()
    code = f"from llmppo.tracking.mirror import connect; connect({f'sqlite:///{new}/mlflow.db'!r}).log_text({run_id!r}, 'more', 'more.txt')"
    subprocess.run(
        [sys.executable, "-c", code], check=True
    )  # a client remembers where a run's artefacts were
    assert (new / "mlartifacts" / "guess-number" / run_id / "artifacts" / "more.txt").is_file()
    assert not study.database.parent.exists()
    bring_artefacts_along(new / "mlflow.db")
    assert client.get_run(run_id).info.artifact_uri == run.info.artifact_uri


def test_a_store_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("no database at all, whatever its name says")
    with pytest.raises(LlmppoError, match=r"mlflow\.db can't be used as MLflow's store"):
        bring_artefacts_along(tmp_path / "mlflow.db")


def test_sample_transcripts_load_as_an_mlflow_table(
    tracked: tuple[Study, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    study, marker = tracked
    monkeypatch.setenv("MLFLOW_TRACKING_URI", study.uri)  # `load_table` also asks the global tracker
    client = connect(study.uri)
    run = client.get_run(marker["run_id"])
    table = client.load_table(run.info.experiment_id, "transcripts.json", run_ids=[run.info.run_id])
    assert list(table.columns) == [
        "episode_id",
        "task_id",
        "policy",
        "success",
        "return",
        "turns",
        "transcript",
    ]
    assert set(table["policy"]) == {0, 4}
    assert (table.groupby("episode_id").size() == 2).all()
    assert table["transcript"].str.startswith("env: Guess my number").all()


def test_logging_again_adds_nothing(tmp_path: Path, store: Path) -> None:
    study = Study(tmp_path, store)
    first = study.track()
    before = study.rows()
    assert max(Counter((key, step) for _, key, step, _, _ in before).values()) == 1
    second = study.track()
    assert (second["run_id"], second["new"]) == (first["run_id"], 0)
    assert study.rows() == before


def test_logging_again_after_a_crash_before_the_tags_adds_nothing(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(tmp_path, store)
    with monkeypatch.context() as patched:
        patched.setattr("llmppo.tracking.mirror.digest_tags", lambda digests: 1 / 0)
        assert study.track()["ok"] is False
    before = study.rows()
    assert before
    assert study.track()["ok"] is True
    assert study.rows() == before
    assert len({run for run, *_ in before}) == 1


def test_an_extended_chain_goes_on_in_its_run(tmp_path: Path, store: Path) -> None:
    study = Study(tmp_path, store, iterations=4, reached=2)
    first = study.track()
    client = connect(study.uri)
    assert client.get_run(first["run_id"]).info.status == "RUNNING"
    write_chain(
        study.run_dir, study.config, "main", 0, reached=4
    )  # the same first two iterations, and two more
    second = study.track()
    assert (second["run_id"], second["new"]) == (first["run_id"], 3)
    assert client.get_run(first["run_id"]).info.status == "FINISHED"
    longer = study.config.model_copy(update={"iterations": 6})
    third = study.track(settings=study.settings(longer))
    assert (third["run_id"], third["new"]) == (first["run_id"], 0)
    assert client.get_run(first["run_id"]).info.status == "RUNNING"
    assert max(Counter((key, step) for _, key, step, _, _ in study.rows()).values()) == 1


def test_changed_content_starts_a_new_run_that_supersedes_the_old(tmp_path: Path, store: Path) -> None:
    study = Study(tmp_path, store)
    first = study.track()
    content = json.loads(study.metrics_file(3).read_text())
    content["metrics"]["rollout/reward_mean"] = 0.123
    study.metrics_file(3).write_text(json.dumps(content))
    second = study.track()
    assert second["run_id"] != first["run_id"]
    client = connect(study.uri)
    assert client.get_run(first["run_id"]).data.tags["superseded_by"] == second["run_id"]
    assert "superseded_by" not in client.get_run(second["run_id"]).data.tags
    values = {(run, step): value for run, key, step, value, _ in study.rows() if key == "rollout/reward_mean"}
    assert values[second["run_id"], 3] == 0.123
    assert values[first["run_id"], 3] != 0.123
    assert study.track()["run_id"] == second["run_id"]


def test_another_config_starts_a_new_run(tmp_path: Path, store: Path) -> None:
    study = Study(tmp_path, store)
    first = study.track()
    values = study.config.model_dump(mode="json", exclude_unset=True)
    changed = ExperimentConfig.model_validate({**values, "ppo": {**values["ppo"], "clip_coef": 0.1}})
    second = study.track(settings=study.settings(changed))
    assert second["run_id"] != first["run_id"]
    assert connect(study.uri).get_run(second["run_id"]).data.params["ppo.clip_coef"] == "0.1"


def test_the_report_and_a_new_export_are_logged_once_they_exist(tmp_path: Path, store: Path) -> None:
    study = Study(tmp_path, store)
    marker = study.track()
    figure = study.folder / "report" / "figures" / "learning_curve.png"
    figure.parent.mkdir(parents=True)
    figure.write_bytes(b"\x89PNG one")
    study.track()
    client = connect(study.uri)
    local = Path(client.download_artifacts(marker["run_id"], "report/learning_curve.png"))
    assert local.read_bytes() == b"\x89PNG one"
    figure.write_bytes(b"\x89PNG two")
    study.track()
    assert (
        Path(client.download_artifacts(marker["run_id"], "report/learning_curve.png")).read_bytes()
        == b"\x89PNG two"
    )


class Broken:
    """A client whose every method raises."""

    def __getattr__(self, name: str) -> Any:
        def method(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"{name}: the tracker is on fire")

        return method


def failures(study: Study, monkeypatch: pytest.MonkeyPatch, kind: str) -> dict[str, Any]:
    """Options of a `track` call whose tracker fails in one of several ways."""
    if kind == "raises":
        monkeypatch.setattr("llmppo.tracking.mirror.connect", lambda uri: Broken())
        return {}
    if kind == "unreachable":
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        return {"uri": "http://127.0.0.1:9"}
    if kind == "not a database":
        study.database.write_bytes(b"not a database at all, but long enough to be looked at" * 20)
        return {}
    if kind == "another schema":
        with sqlite3.connect(study.database) as database:
            database.execute("update alembic_version set version_num = 'from_the_future'")
        return {}
    return {"uri": "gopher://nowhere"}


@pytest.mark.parametrize(
    "kind", ["raises", "unreachable", "not a database", "another schema", "unknown scheme"]
)
def test_a_tracker_that_fails_warns_and_still_writes_the_marker(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    study = Study(tmp_path, store, iterations=2)
    with caplog.at_level(logging.WARNING, logger="llmppo"):
        marker = study.track(**failures(study, monkeypatch, kind))
    assert marker["ok"] is False
    assert marker["error"]
    assert any("training is not affected" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_a_locked_store_costs_a_wait_and_a_warning(tmp_path: Path, store: Path) -> None:
    study = Study(tmp_path, store, iterations=2)
    holder = sqlite3.connect(study.database, isolation_level=None)
    holder.execute("begin exclusive")
    marker = study.track()
    holder.execute("rollback")
    holder.close()
    assert marker["ok"] is False
    assert "locked" in marker["error"]
    assert study.track()["ok"] is True


def test_an_error_in_the_middle_marks_the_run_as_failed_until_it_works_again(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(tmp_path, store, iterations=2)
    with monkeypatch.context() as patched:
        patched.setattr(Mirror, "_log_artefacts", lambda self: 1 / 0)
        assert "ZeroDivisionError" in study.track()["error"]
    client = connect(study.uri)
    (run,) = client.search_runs([client.get_experiment_by_name("guess-number").experiment_id])
    assert run.info.status == "FAILED"
    assert study.track()["run_id"] == run.info.run_id
    assert client.get_run(run.info.run_id).info.status == "FINISHED"


def test_initialising_writes_its_marker_either_way(tmp_path: Path) -> None:
    out = tmp_path / "ready.json"
    mlflow_init.run({}, uri=f"sqlite:///{tmp_path}/deep/er/mlflow.db", out=out)
    assert read_json(out) == {"ok": True}
    assert (tmp_path / "deep" / "er" / "mlflow.db").is_file()
    mlflow_init.run({}, uri="gopher://nowhere", out=out)
    assert json.loads(out.read_text())["ok"] is False


def test_a_store_that_fills_the_disk_of_the_results_fails_its_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the marker would stand for a store that isn't there, once there is room."""

    def full(_: str) -> None:
        raise RuntimeError("(sqlite3.OperationalError) database or disk is full")

    monkeypatch.setattr("llmppo.tracking.mirror.initialise", full)
    out = tmp_path / "ready.json"
    with pytest.raises(RuntimeError):
        mlflow_init.run({}, uri=f"sqlite:///{tmp_path}/mlflow.db", out=out)
    assert not out.exists()
    for elsewhere in ("sqlite:////proc/mlflow.db", "http://127.0.0.1:1"):
        mlflow_init.run({}, uri=elsewhere, out=out)
        assert json.loads(out.read_text())["ok"] is False


@pytest.mark.parametrize("after_s", [0.0, 0.5])
def test_a_store_that_was_killed_half_made_is_made_anew(tmp_path: Path, after_s: float) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    code = f"from llmppo.tracking.mirror import initialise; initialise({uri!r})"
    child = subprocess.Popen([sys.executable, "-c", code])
    while not list(tmp_path.rglob("mlflow.db")):
        assert child.poll() is None
    time.sleep(after_s)
    child.kill()
    child.wait()
    assert not (tmp_path / "mlflow.db").exists()
    initialise(uri)
    assert connect(uri).create_experiment("guess-number")
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]


@pytest.mark.slow
def test_six_processes_track_at_once_into_an_initialised_store(tmp_path: Path) -> None:
    evaluation = {"every": 2, "episodes": 4, "decoding": ["sampled"]}
    config, folder, _ = write_results(
        tmp_path, game_config(seeds=list(range(6)), iterations=2, evaluation=evaluation)
    )
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    initialise(uri)
    settings = json.dumps(stage_settings(variant_config(config, "main"), "track"))
    code = (
        "import json, sys; from pathlib import Path; from llmppo.stages import track\n"
        "settings, seed, root, uri = sys.argv[1:]\n"
        "folder = Path(root) / f'seed-{seed}'\n"
        "track.run(json.loads(settings), experiment='guess-number', variant='main', seed=int(seed),"
        " run_dir=folder, uri=uri, out=folder / 'tracking.json')"
    )
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code, settings, str(seed), str(folder / "main"), uri], env=os.environ
        )
        for seed in range(6)
    ]
    assert [job.wait(timeout=300) for job in jobs] == [0] * 6
    markers = [
        json.loads((folder / "main" / f"seed-{seed}" / "tracking.json").read_text()) for seed in range(6)
    ]
    assert [marker["ok"] for marker in markers] == [True] * 6, markers
    assert len({marker["run_id"] for marker in markers}) == 6
    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        assert store.execute("select count(*) from experiments where name = 'guess-number'").fetchone() == (
            1,
        )
        counts = store.execute(
            "select run_uuid, count(*) from metrics where key = 'eval/success_rate' group by 1"
        ).fetchall()
    assert [count for _, count in counts] == [2] * 6


# --- contents


def test_names_and_values_respect_mlflow_s_limits() -> None:
    assert legal("eval/success rate-1.0:x") == "eval/success rate-1.0:x"
    assert legal("a{b}é") == "a_b__"
    long = legal("x" * 400)
    assert len(long) == 250
    assert long != legal("x" * 401)
    params = flatten({"a": {"b": 1, "c": {}, "d": [1, None]}, "e": None, "f": "y" * 9000, "g": True})
    assert params["a.b"] == "1"
    assert params["a.c"] == "{}"
    assert params["a.d"] == "[1, null]"
    assert params["e"] == "null"
    assert params["g"] == "true"
    assert len(params["f"]) == MAX_PARAM


def test_many_digests_fit_into_tags() -> None:
    digests = {f"update-{i:04d}": f"{i:012x}" for i in range(1000)}
    tags = digest_tags(digests)
    assert max(len(value) for value in tags.values()) <= 8000
    assert digests_in({**tags, "study": "not json"}) == digests


def test_a_digest_covers_values_and_finish_time(tmp_path: Path, store: Path) -> None:
    study = Study(tmp_path, store, iterations=2)
    before = chain_entries(load_chain(study.run_dir, "main", 0))
    content = json.loads(study.metrics_file(2).read_text())
    study.metrics_file(2).write_text(json.dumps({**content, "finished_at": content["finished_at"] + 1}))
    after = chain_entries(load_chain(study.run_dir, "main", 0))
    assert {name for name in before if before[name].digest != after[name].digest} == {"update-0002"}


def test_extending_keeps_the_config_hash_and_learning_settings_change_it() -> None:
    config = {"name": "a", "iterations": 10, "description": "", "export": {}, "ppo": {"clip_coef": 0.2}}
    assert config_hash(config) == config_hash({**config, "iterations": 20, "description": "longer"})
    assert config_hash(config) != config_hash({**config, "ppo": {"clip_coef": 0.1}})


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("sqlite:///results/mlflow.db", Path("results/mlflow.db")),
        ("sqlite:////tmp/a b/mlflow.db", Path("/tmp/a b/mlflow.db")),
        ("sqlite:///", None),
        ("http://host:5000", None),
    ],
)
def test_database_file_of_a_uri(uri: str, path: Path | None) -> None:
    assert sqlite_path(uri) == path


def run_page(study: Study) -> str:
    return (study.run_dir / "mlflow.html").read_text(encoding="utf-8")


def test_the_report_links_to_the_run_and_the_run_to_the_report(tmp_path: Path, store: Path) -> None:
    study = Study(tmp_path, store)
    page = study.folder / "report" / "report.html"
    settings = stage_settings(study.config, "report")
    report.run(settings, results=study.folder, baselines=None, out=page)
    assert "MLflow run" not in page.read_text(encoding="utf-8")
    report.run(settings, results=study.folder, baselines=None, out=page, tracked=True)
    assert '<a href="../main/seed-0/mlflow.html">MLflow run</a>' in page.read_text(encoding="utf-8")
    run_id = study.track()["run_id"]
    run = connect(study.uri).get_run(run_id)
    own = f"#/experiments/{run.info.experiment_id}/runs/{run_id}"
    assert f'<a href="http://127.0.0.1:5000/{own}">' in run_page(study)
    assert f"<code>{ui_command(study.uri)}</code>" in run_page(study)
    assert ui_command(study.uri) == f"mlflow ui --backend-store-uri {study.uri}"
    note = run.data.tags["mlflow.note.content"]
    assert note == f"{study.config.description}\n\nReport: [report.html]({own}/artifacts/report/report.html)"


def test_a_chain_that_is_not_tracked_says_why_where_its_run_would_be(tmp_path: Path, store: Path) -> None:
    study = Study(tmp_path, store)
    assert study.track(uri="sqlite:////proc/no/such.db")["ok"] is False
    assert "main, seed 0 is not in MLflow: " in run_page(study)
    assert "href" not in run_page(study)


@pytest.mark.slow
def test_the_links_work_in_the_real_ui(tmp_path: Path, store: Path, browser: Any) -> None:
    study = Study(tmp_path, store)
    settings = stage_settings(study.config, "report")
    report.run(settings, results=study.folder, baselines=None, out=study.folder / "report" / "report.html")
    study.track()
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        study.uri,
        "--port",
        str(port),
    ]
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_for(f"http://127.0.0.1:{port}/health")
        page = browser.new_page()
        page.goto(f"file://{study.run_dir / 'mlflow.html'}")
        address = page.locator("a").get_attribute("href").replace(":5000", f":{port}")
        page.goto(address)
        page.get_by_text("main/seed-0").first.wait_for(timeout=60_000)
        back = page.get_by_role("link", name="report.html").get_attribute("href", timeout=60_000)
        page.goto(f"http://127.0.0.1:{port}/{back}")
        shown = page.frame_locator("iframe").get_by_role("heading", name="guess-number")
        shown.first.wait_for(timeout=60_000)
        page.close()
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
