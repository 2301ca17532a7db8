"""What a config may name to be imported: modules of installed packages and of the working directory."""

import subprocess
import sys
from pathlib import Path

import pytest

from llmppo.errors import ConfigError
from llmppo.experiment import parse_experiment
from llmppo.imports import load_callable, module_fault
from llmppo.plan import Plan

TOUCH = (
    "from pathlib import Path\nPath({mark!r}).touch()\ndef reward(completion, answer, question): return 1.0\n"
)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment's folder to be in, and a sibling; each has a module that leaves a mark when it is imported."""
    for folder in ("experiment", "sibling"):
        (tmp_path / folder).mkdir()
        code = TOUCH.format(mark=str(tmp_path / f"{folder} ran"))
        (tmp_path / folder / f"of_{folder}.py").write_text(code)
    monkeypatch.chdir(tmp_path / "experiment")
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("of_experiment", "of_sibling"):
        sys.modules.pop(name, None)


def ran(places: Path) -> list[str]:
    return sorted(path.name for path in places.glob("* ran"))


def test_the_own_folder_and_installed_packages_are_searched(places: Path) -> None:
    assert load_callable("of_experiment:reward", "env.kwargs.reward")("a", "b", "c") == 1.0
    assert ran(places) == ["experiment ran"]
    assert load_callable("llmppo.envs.guess_number:GuessNumber", "env.factory")
    assert load_callable("numpy.linalg:norm", "env.factory")


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("of_sibling:reward", "no module `of_sibling`"),
        ("../sibling/of_sibling:reward", "is not the dotted name of a module"),
        ("..sibling.of_sibling:reward", "is not the dotted name of a module"),
        ("{places}/sibling/of_sibling:reward", "is not the dotted name of a module"),
        ("{places}/sibling/of_sibling.py:reward", "is not the dotted name of a module"),
        ("os:system", "`os` belongs to Python itself"),
        ("os.path:exists", "`os` belongs to Python itself"),
        ("builtins:eval", "`builtins` belongs to Python itself"),
        ("subprocess:call", "`subprocess` belongs to Python itself"),
        ("of_experiment:Path.touch", "has no `Path.touch`"),
        ("llmppo.imports:RAISED_BY_USERS", "not something to call"),
    ],
)
def test_other_places_are_refused(places: Path, spec: str, fault: str) -> None:
    spec = spec.format(places=places)
    with pytest.raises(ConfigError, match=rf"^env\.factory: .*{fault}"):
        load_callable(spec, "env.factory")
    assert ran(places) in ([], ["experiment ran"])
    if "of_experiment" not in spec and "RAISED" not in spec:
        values = {"name": "x", "base_model": {"kind": "tiny"}, "env": {"factory": spec}}
        with pytest.raises(ConfigError, match=rf"env\.factory: .*{fault}"):
            parse_experiment(values)


def test_a_folder_on_the_module_path_is_none_of_them(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH holds whatever a shell's profile put there."""
    monkeypatch.syspath_prepend(str(places / "sibling"))
    fault = f"`of_sibling` lies in {places / 'sibling'}, which is neither an installed package nor"
    assert fault in (module_fault("of_sibling") or "")
    with pytest.raises(ConfigError, match=r"env\.factory: `of_sibling` lies in"):
        load_callable("of_sibling:reward", "env.factory")
    assert ran(places) == []


def test_a_package_installed_as_editable_is_installed(places: Path) -> None:
    """pip notes the source folder of one, wherever it lies."""
    site = places / "site"
    info = site / "mine-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "direct_url.json").write_text(
        f'{{"dir_info": {{"editable": true}}, "url": "{(places / "sibling").as_uri()}"}}'
    )
    code = "from llmppo.imports import module_fault; print(module_fault('of_sibling'))"
    paths = {
        "PYTHONPATH": f"{Path(load_callable.__code__.co_filename).parents[1]}:{site}:{places / 'sibling'}"
    }
    done = subprocess.run([sys.executable, "-c", code], env=paths, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("def (", r"SyntaxError: invalid syntax \(broken.py, line 1\)"),
        ("import no_such_library", "No module named 'no_such_library'"),
        ("\nraise SystemExit(3)", r"SystemExit: 3 \(.*broken.py, line 2\)"),
        ("1 / 0", r"ZeroDivisionError: division by zero \(.*broken.py, line 1\)"),
    ],
)
def test_a_module_that_can_not_be_imported_says_where(places: Path, code: str, fault: str) -> None:
    Path("broken.py").write_text(code)
    with pytest.raises(ConfigError, match=rf"^env\.factory: importing `broken` failed: {fault}"):
        load_callable("broken:reward", "env.factory")


@pytest.mark.parametrize("code", ["def (", "a = '\0'"])
def test_what_is_not_python_is_found_before_a_run(places: Path, code: str) -> None:
    """Also where a module of yours imports it."""
    Path("mine.py").write_text("import wrong_here")
    Path("wrong_here.py").write_text(code)
    values = {"name": "x", "base_model": {"kind": "tiny"}, "env": {"factory": "mine:Env"}}
    with pytest.raises(ConfigError, match=r"wrong_here\.py is not valid Python"):
        Plan(parse_experiment(values))
