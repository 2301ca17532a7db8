"""The example of a workflow that uses this one as a module, really run, and Snakemake's own report of it."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from workflow_runs import REPOSITORY

pytestmark = [pytest.mark.workflow, pytest.mark.slow]
EXAMPLE = REPOSITORY / "examples" / "module"


def snakemake(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "2", *arguments],
        cwd=folder, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the example, run to its end as its first lines say."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(
        EXAMPLE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("results", ".snakemake")
    )
    text = (folder / "Snakefile").read_text()
    assert '"../../Snakefile"' in text
    (folder / "Snakefile").write_text(text.replace("../../Snakefile", str(REPOSITORY / "Snakefile")))
    command = re.search(r"snakemake --cores 2 (.*)", text)
    assert command is not None
    snakemake(folder, *command[1].split())
    return folder


def test_the_example_goes_on_with_the_results_of_the_module(example: Path) -> None:
    rows = list(csv.DictReader((example / "ranking.csv").open()))
    assert {row["variant"] for row in rows} == {"main", "narrow"}
    assert (example / "results/tiny/narrow/seed-0/export/adapter/adapter_model.safetensors").is_file()
    assert "Nothing to be done" in snakemake(example, "-n")


def embedded(page: str, name: str) -> Any:
    """A value that Snakemake wrote into the script of its report."""
    start = f"var {name} = "
    value, _ = json.JSONDecoder().raw_decode(page, page.index(start + "{") + len(start))
    return value


def test_snakemakes_report_has_captions_and_categories(example: Path) -> None:
    snakemake(example, "--report", "study.html")
    page = (example / "study.html").read_text()
    results = {name.rpartition("/")[2]: entry for name, entry in embedded(page, "results").items()}
    assert results.keys() == {"report.html", "rollouts.html", "learning_curve.png", "summary.csv"}
    ((category, sections),) = embedded(page, "categories").items()
    assert category == "Experiment"
    assert sum(map(len, sections.values())) == 4
    assert "floors and bounds" in results["learning_curve.png"]["caption"]
    assert results["summary.csv"]["labels"] == {"experiment": "tiny", "content": "summary table"}
