"""The code token changes with code that numbers depend on, and with nothing else."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from llmppo import codetoken
from llmppo.codetoken import callables_in, code_token, module_hashes, require_planned
from llmppo.config import EnvConfig
from llmppo.errors import ConfigError
from llmppo.imports import checked_imports, load_callable
from llmppo.stage_settings import STAGES

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a module below a folder on sys.path, and forget what was read before."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        codetoken._module.cache_clear()
        codetoken._find.cache_clear()

    return put


def token(*roots: str) -> dict[str, str]:
    return module_hashes(*roots)


def test_comments_docstrings_and_layout_change_nothing(write: Write) -> None:
    write("game.py", "def play(x):\n    return x + 1\n")
    before = token("game")
    write("game.py", '"""A game."""\n# why\ndef play( x ):\n    """Play."""\n\n    return (x + 1)\n')
    assert token("game") == before
    write("game.py", "def play(x):\n    return x + 2\n")
    assert token("game") != before


def test_fields_of_the_config_change_nothing_but_its_methods_do(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "class Section:\n    rate: float = {}\n\n    def scale(self):\n        return {} * self.rate\n"
    write("settings.py", text.format(1.0, 2))
    plain = token("settings")
    monkeypatch.setattr(codetoken, "CONFIG", "settings")
    write("settings.py", text.format(1.0, 2))
    before = token("settings")
    assert before != plain
    write("settings.py", text.format(3.0, 2))
    assert token("settings") == before
    write("settings.py", text.format(3.0, 4))
    assert token("settings") != before


def test_a_string_that_is_no_docstring_counts(write: Write) -> None:
    write("game.py", "def greet():\n    return 'a'\n")
    before = token("game")
    write("game.py", "def greet():\n    return 'b'\n")
    assert token("game") != before


def test_imports_are_followed_wherever_they_stand(write: Write) -> None:
    write("pack/__init__.py", "")
    write("pack/deep.py", "value = 1\n")
    write("pack/sibling.py", "value = 1\n")
    write("pack/dynamic.py", "value = 1\n")
    write("direct.py", "value = 1\n")
    write(
        "game.py",
        "import direct\n"
        "def late():\n"
        "    from pack import deep\n"
        "    from importlib import import_module\n"
        "    import_module('pack.dynamic')\n",
    )
    write("pack/deep.py", "from .sibling import value\n")
    assert set(token("game")) == {"game", "direct", "pack", "pack.deep", "pack.sibling", "pack.dynamic"}


def test_a_package_without_init_and_a_circle_are_found(write: Write) -> None:
    write("space/one.py", "from space import two\n")
    write("space/two.py", "import space.one\n")
    assert set(token("space.one")) == {"space.one", "space.two"}


def test_nothing_is_imported_to_find_it(write: Write) -> None:
    write("danger/__init__.py", "raise SystemExit('imported')\n")
    write("danger/inner.py", "value = 1\n")
    assert set(token("danger.inner")) == {"danger", "danger.inner"}
    assert "danger" not in sys.modules


def test_libraries_are_not_part_of_it() -> None:
    hashes = token("llmppo.files")
    assert set(hashes) == {"llmppo.files", "llmppo.errors", "llmppo.secrecy"}
    assert not any(name.partition(".")[0] in ("torch", "yaml", "json") for name in token("llmppo.config"))


def test_the_version_number_is_not_part_of_it() -> None:
    assert "llmppo" not in token("llmppo.provenance")


def test_cli_and_plan_are_not_part_of_a_stage() -> None:
    for stage in ("rollout", "update", "evaluate", "export", "critic_warmup"):
        names = set(token(f"llmppo.stages.{stage}"))
        assert f"llmppo.stages.{stage}" in names
        assert not names & {"llmppo.cli", "llmppo.plan", "llmppo.run", "llmppo.codetoken", "llmppo.layout"}


def test_only_stages_that_train_depend_on_the_losses() -> None:
    stages = set(STAGES) - {"iterations"}  # which is several of the others
    dependent = {stage for stage in stages if "llmppo.ppo.losses" in token(f"llmppo.stages.{stage}")}
    assert dependent == {"critic_warmup", "update"}


def test_callables_in_settings_are_found_at_any_depth() -> None:
    settings = {
        "env": {"factory": "my_game:Game", "kwargs": {"reward": "pkg.rewards:exact", "url": "https://x.y"}},
        "others": ["a b:c", "other:thing", 3, None],
    }
    assert callables_in(settings) == {"my_game", "pkg.rewards", "other"}


def test_user_code_in_settings_changes_the_token(write: Write) -> None:
    settings = {"env": {"factory": "my_game:Game"}}
    write("my_game.py", "import rewards\nclass Game: ...\n")
    write("rewards.py", "VALUE = 1\n")
    before = code_token("rollout", settings)
    write("rewards.py", "VALUE = 2\n")
    assert code_token("rollout", settings) != before


def test_a_name_that_is_no_module_is_ignored() -> None:
    assert code_token("rollout", {"x": "no_such_module_here:f"}) == code_token("rollout", {})


GAME = "class Game:\n    def reset(self, rng): ...\n    def step(self, action): ...\n"


def test_a_stage_refuses_code_that_its_run_was_not_planned_with(write: Write, tmp_path: Path) -> None:
    settings = {"env": EnvConfig(factory="my_game:Game").model_dump(mode="json"), "dataset_present": False}
    write("parts.py", "VALUE = 1\n")
    write("my_game.py", f"from parts import VALUE\n{GAME}")
    code = code_token("baselines", settings)

    def measure() -> subprocess.CompletedProcess[str]:
        command = [
            str(Path(sys.executable).with_name("llmppo")), "baselines", "--settings", json.dumps(settings),
            "--code", code, "--out", "baselines.json",
        ]  # fmt: skip
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    write("parts.py", "VALUE = 2\n")
    refused = measure()
    assert refused.returncode == 1
    assert "your code was edited after this run was planned, last " in refused.stderr
    assert "parts.py at " in refused.stderr
    assert not (tmp_path / "baselines.json").exists()
    write("parts.py", "VALUE = 1  # as before\n")
    done = measure()
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "baselines.json").exists()


def test_code_that_is_changed_once_it_was_imported_does_no_harm(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write("my_other.py", "def reward(): ...\n")
    settings = {"reward": "my_other:reward"}
    code = code_token("rollout", settings)
    with checked_imports(partial(require_planned, code, settings)):
        assert load_callable("my_other:reward", "env.kwargs.reward")
        write("my_other.py", "def reward(): return 1\n")
        assert load_callable("my_other:reward", "env.kwargs.reward")
    with pytest.raises(ConfigError, match=r"my_other\.py"):
        require_planned(code, settings)


def test_code_that_is_gone_differs_from_what_was_planned(write: Write, tmp_path: Path) -> None:
    write("my_gone.py", "def reward(): ...\n")
    settings = {"reward": "my_gone:reward"}
    code = code_token("rollout", settings)
    (tmp_path / "my_gone.py").unlink()
    with pytest.raises(ConfigError, match="edited after this run was planned; nothing"):
        require_planned(code, settings)


def test_the_package_and_libraries_alone_have_no_part_of_the_users() -> None:
    for factory in ("llmppo.envs.guess_number:GuessNumber", "numpy.linalg:norm"):
        code = code_token("rollout", {"env": {"factory": factory}})
        assert "-" not in code
        require_planned(code, {"env": {"factory": factory}})
