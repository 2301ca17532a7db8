"""docs/correctness.md names tests that exist."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "correctness.md").read_text(encoding="utf-8")


def test_every_named_test_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 50
    for file, name in named:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
            f"{file}::{name}"
        )


def test_every_section_names_a_test():
    for section in PAGE.split("\n## ")[1:]:
        assert "::" in section, section.splitlines()[0]
