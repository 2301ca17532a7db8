"""The arithmetic of benchmarks/scale.py against numbers worked out by hand, and docs/scale.md against it."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from llmppo.experiment import parse_experiment

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "scale.md").read_text()


@pytest.fixture(scope="module")
def scale() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale", REPOSITORY / "benchmarks" / "scale.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale"] = module
    spec.loader.exec_module(module)
    return module


def test_sizes_worked_out_by_hand(scale: ModuleType) -> None:
    model = scale.Model(layers=2, width=4, mlp=6, vocabulary=10, rank=3)
    assert model.matrix_weights == 2 * (4 * 16 + 3 * 24) + 40
    assert model.base == 2 * (model.matrix_weights + 40)
    assert model.adapter_weights == 2 * 3 * (4 * 8 + 3 * 10)
    assert model.kept_token == 2 * 2 * 2 * 4  # keys and values, two bytes each, two layers, four numbers


def test_times_worked_out_by_hand(scale: ModuleType) -> None:
    """1024 rows of 2048 tokens; the base is 13.48 GB, 6.607 G of its weights are multiplied."""
    assert scale.learning(1) == pytest.approx(1024 * 2048 * 7 * 2 * 6.607e9 / 395.6e12, rel=1e-3)
    assert scale.learning(8) == pytest.approx(scale.learning(1) / 8)
    slow = 315e9 / 1000
    assert scale.learning(8, slow) == pytest.approx(32 * 7 * 13.48e9 * 7 / 8 / slow, rel=1e-3)
    reading = 1024 * 1024 * 2 * 6.607e9 / (512 * 395.6e12)  # half of each row is read
    decoding = 1024 * (13.48e9 + 2 * 1024 * 524288) / 2.01e12  # two episodes a GPU
    assert scale.sampling(512) == pytest.approx(decoding + reading, rel=1e-3)
    assert scale.loading(64) == pytest.approx(64 * 13.48e9 / 20e9, rel=1e-3)


def test_a_layout_never_has_more_ranks_than_a_node(scale: ModuleType) -> None:
    for gpus in (2, 8, 64, 512):
        layout = scale.divided(gpus)
        assert layout.servers + layout.ranks == gpus
        assert 1 <= layout.ranks <= 8


def test_the_page_has_the_table(scale: ModuleType) -> None:
    assert scale.table() in PAGE


@pytest.mark.parametrize("lines", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_config_lines_of_the_page_are_valid(lines: str) -> None:
    values = yaml.safe_load(lines)
    given = {"name": "page", "base_model": {"kind": "pretrained", "path": "owner/name"}}
    parse_experiment({**given, **values}, "docs/scale.md")
