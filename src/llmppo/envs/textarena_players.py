"""Scripted players of TextArena games, to measure what good play reaches."""

import random
import re
from collections.abc import Sequence

VALUE = re.compile(r"current value is (\d\.\d+)")
# Gilbert and Mosteller (1966), table 7: with r draws to come, a record of at least this is worth taking.
SECRETARY_THRESHOLDS = (0.0, 0.5, 0.6899, 0.7758, 0.8246, 0.8559, 0.8778, 0.8939, 0.9063, 0.9160)
SECRETARY_DRAWS = 5


def secretary(rng: random.Random, texts: Sequence[str]) -> str:
    """Optimal play of `Secretary-v0`, which shows five uniform values: thresholds of full information."""
    values = [float(value) for text in texts[::2] for value in VALUE.findall(text)]
    threshold = SECRETARY_THRESHOLDS[max(0, SECRETARY_DRAWS - len(values))]
    return "[accept]" if values[-1] == max(values) and values[-1] >= threshold else "[continue]"
