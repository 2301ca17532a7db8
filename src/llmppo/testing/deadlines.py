"""A bound on how long a call under test may take."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """AssertionError for what is still at work after `seconds`; in a main thread only."""

    def late(*_: object) -> None:
        raise AssertionError(f"still at work after {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
