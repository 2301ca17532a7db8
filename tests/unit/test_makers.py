"""What a chain was made with, as `llmppo adopt` asks for it."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmppo.errors import LlmppoError
from llmppo.experiment import parse_experiment
from llmppo.makers import note_end, note_start, require_one_maker
from llmppo.plan import Plan

TINY = yaml.safe_load((Path(__file__).parents[2] / "config" / "test" / "tiny.yaml").read_text())


def plan(**changes: Any) -> Plan:
    made = Plan(parse_experiment({**TINY, "seeds": [0, 1], **changes}))
    for chain in made.chains:
        Path(made.layout.config(*chain)).parent.mkdir(parents=True, exist_ok=True)
    return made


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_chain_has_one_maker_until_an_edit_and_again_once_its_run_has_ended() -> None:
    first, longer, edited = plan(), plan(iterations=7), plan(env={**TINY["env"], "retries": 2})
    require_one_maker(first)  # made before makers were noted
    for makes in (first, longer):
        note_start(makes)
        require_one_maker(makes)
    note_start(edited)
    for makes in (first, edited):
        with pytest.raises(LlmppoError, match="main/seed-0 was being made anew after an edit"):
            require_one_maker(makes)
    note_end(edited)
    require_one_maker(edited)
    with pytest.raises(LlmppoError, match="main/seed-0 was made with other code"):
        require_one_maker(first)


def test_a_deleted_chain_begins_anew() -> None:
    first, edited = plan(), plan(env={**TINY["env"], "retries": 2})
    note_start(first)
    note_start(edited)
    for seed in (0, 1):
        with pytest.raises(LlmppoError, match=f"or delete results/tiny/main/seed-{seed} to make it anew"):
            require_one_maker(edited)
        shutil.rmtree(f"results/tiny/main/seed-{seed}")
    require_one_maker(edited)
    note_start(edited)
    require_one_maker(plan(env={**TINY["env"], "retries": 2}))  # with folders again
