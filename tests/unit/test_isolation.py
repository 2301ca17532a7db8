import random

import numpy as np

from llmppo.envs.isolation import GlobalRandom


def draws() -> tuple[float, float]:
    return random.random(), float(np.random.rand())


def test_draws_inside_follow_the_seed_and_go_on_where_they_stopped():
    whole, parts = GlobalRandom(7), GlobalRandom(7)
    with whole.installed():
        expected = [draws(), draws()]
    found = []
    for _ in range(2):
        with parts.installed():
            found.append(draws())
        draws()  # someone else's
    assert found == expected
    with GlobalRandom(8).installed():
        assert draws() != expected[0]


def test_draws_outside_are_untouched_also_after_an_error():
    random.seed(1)
    np.random.seed(1)
    expected = [draws(), draws()]
    random.seed(1)
    np.random.seed(1)
    first = draws()
    try:
        with GlobalRandom(3).installed():
            random.seed(99)
            np.random.seed(99)
            raise KeyError
    except KeyError:
        pass
    assert [first, draws()] == expected
