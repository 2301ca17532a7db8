"""docs/parameters.md follows the config models and the constructor."""

import inspect
import re
from pathlib import Path

from llmppo import LLMPPO
from llmppo.config import PPOConfig, SamplingConfig
from llmppo.reference import parameter_reference

PAGE = Path(__file__).parents[2] / "docs" / "parameters.md"


def test_the_page_is_in_step() -> None:
    assert PAGE.read_text() == parameter_reference(), (
        "run: llmppo schema --parameters --out docs/parameters.md"
    )


def test_the_page_and_the_constructor_name_the_same_parameters() -> None:
    tables = PAGE.read_text().partition("## Where this differs")[0]
    documented = set(re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE))
    assert documented == set(inspect.signature(LLMPPO.__init__).parameters) - {"self"}


def test_constructor_defaults_are_those_of_the_config() -> None:
    parameters = inspect.signature(LLMPPO.__init__).parameters
    for section in (PPOConfig, SamplingConfig):
        for name, field in section.model_fields.items():
            assert parameters[name].default == field.default, name


def test_every_setting_says_what_it_does() -> None:
    for section in (PPOConfig, SamplingConfig):
        assert [name for name, field in section.model_fields.items() if not field.description] == []
