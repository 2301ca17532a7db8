"""The shipped notebooks: stored without outputs, and run by the workflow on small real results."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from workflow_runs import FASTER_NAME, REPOSITORY, SMOKE

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


def outputs(notebook: Path) -> str:
    """All text that a run notebook shows."""
    cells = nbformat.read(notebook, as_version=4).cells
    found = [output for cell in cells for output in cell.get("outputs", ())]
    return "\n".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in found)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert len(content.cells) < 20
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    (parameters,) = [cell for cell in code if "parameters" in cell.metadata.get("tags", ())]
    assert parameters.source.startswith("results = ")


@pytest.fixture(scope="module")
def executed(replayed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The notebooks as the rule `notebooks` leaves them."""
    folder = tmp_path_factory.mktemp("notebooks")
    shutil.copytree(replayed, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".home.json"))
    config = sorted((folder / "results/smoke/logs").glob("snakemake-*.yaml"))[-1]
    shutil.copy(config, folder / SMOKE.name)
    ran = subprocess.run(
        [
            str(Path(sys.executable).with_name("llmppo")), "run", "--config", SMOKE.name, "--cores", "2", "notebooks",
        ],
        cwd=folder, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder / "results" / "smoke" / "notebooks"


@pytest.mark.slow
@pytest.mark.workflow
def test_the_workflow_runs_every_notebook_on_its_results(executed: Path) -> None:
    assert [path.name for path in sorted(executed.iterdir())] == [path.name for path in NOTEBOOKS]
    compared = outputs(executed / "compare_runs.ipynb")
    assert "9 evaluations and 9 updates in results/smoke" in compared
    assert all(name in compared for name in ("main", "same", FASTER_NAME))
    sampled = outputs(executed / "rollouts.ipynb")
    assert re.search(r"main +0 +3 +48 ", sampled)  # variant, seed, iterations, episodes
    figures = [
        output
        for path in executed.iterdir()
        for cell in nbformat.read(path, as_version=4).cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    ]
    assert len(figures) == 4


@pytest.mark.slow
@pytest.mark.workflow
def test_the_credit_of_the_notebook_is_that_of_the_update(executed: Path) -> None:
    told = re.search(r"return by at most (\S+)", outputs(executed / "credit_assignment.ipynb"))
    assert told is not None
    assert float(told[1]) < 1e-5
