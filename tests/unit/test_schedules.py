"""The learning-rate schedule, by hand."""

import math

import pytest

from llmppo.config import CosineLRScheduleConfig
from llmppo.ppo.schedules import lr_scale

SCHEDULE = CosineLRScheduleConfig(num_steps=10, warmup_proportion=0.2, min_lr_ratio=0.1)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.5),
        (1, 1.0),
        (2, 1.0),
        (6, 0.55),
        (8, 0.1 + 0.45 * (1 + math.cos(0.75 * math.pi))),
        (10, 0.1),
        (99, 0.1),
    ],
)
def test_warm_up_then_half_a_cosine_then_constant(step, expected):
    assert lr_scale(step, SCHEDULE) == pytest.approx(expected)


def test_the_actor_waits_for_the_critic_and_then_has_the_remaining_calls():
    """Warm-up of two calls out of ten: eight are left, one of them (int(8 * 0.2)) warms up."""
    assert [lr_scale(step, SCHEDULE, start=2) for step in (0, 1)] == [0.0, 0.0]
    assert lr_scale(2, SCHEDULE, start=2) == 1.0
    assert lr_scale(3, SCHEDULE, start=2) == 1.0  # the top of the cosine
    assert lr_scale(3 + 7, SCHEDULE, start=2) == pytest.approx(0.1)


def test_no_schedule_is_constant_after_the_start():
    assert lr_scale(1000, None) == 1.0
    assert lr_scale(1, None, start=2) == 0.0
    assert lr_scale(2, None, start=2) == 1.0


def test_a_schedule_of_one_step():
    one = CosineLRScheduleConfig(num_steps=1)
    assert (lr_scale(0, one), lr_scale(1, one)) == (1.0, pytest.approx(0.1))
