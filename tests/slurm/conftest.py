"""Modules that these tests share with each other and with those of the workflow."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "workflow")]
