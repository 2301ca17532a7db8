"""Global random state for libraries that draw from it, so that nobody else's draws change.

`random` and NumPy's legacy generator are one per process. A `GlobalRandom` is a state of both that belongs
to one episode: inside `installed()` the library finds it, outside the process has its own again.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_LOCK = threading.RLock()  # environments may step in threads; the state is one for all of them


class GlobalRandom:
    """A private state of the two global generators, a function of `seed`."""

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the state, keep what the block made of it, and put back what was there before."""
        with _LOCK:
            before = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])
