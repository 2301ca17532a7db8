"""The reward of the chaos experiment: that of `larger_number`, until a file `fault.json` says otherwise.

`{"mode": ..., "times": n}` makes the next n calls go wrong, over all processes that work in this folder.
"""

import json
import math
import os
import sys
import time
from pathlib import Path

from llmppo.envs.rewards import number_choice

FAULT = Path("fault.json")
CALLS = Path("fault.calls")


def reward(completion, answer, question):
    if FAULT.exists():
        fault = json.loads(FAULT.read_text())
        with open(CALLS, "a") as calls:
            calls.write("x")
            calls.flush()
            number = os.fstat(calls.fileno()).st_size
        if number <= fault["times"]:
            return WRONG[fault["mode"]]()
    return number_choice(completion, answer, question)


reward.choices = number_choice.choices


def fail():
    raise RuntimeError("this reward was told to fail")


WRONG = {
    "hangs": lambda: time.sleep(300),
    "raises": fail,
    "exits": lambda: sys.exit(3),
    "infinite": lambda: math.inf,
    "NaN": lambda: math.nan,
    "too large for a float": lambda: 10**400,
    "too large for fp32": lambda: 1e300,
    "text": lambda: "1.0",
    "None": lambda: None,
    "a list": lambda: [1.0],
    "info that is no mapping": lambda: (1.0, "good"),
    "info that is no JSON": lambda: (1.0, {"seen": object()}),
}
