"""Pooling of action tokens to turns and episodes."""

import math

import pytest
import torch

from llmppo.ppo.units import edge_tokens, masked_mean, pool, spread, tokens_per_turn, unit_mask, zero_masked

# Row 0: turn 0 has two tokens, turn 2 one (turn 1 none). Row 1: nothing. Row 2: turn 1 only.
MASK = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]]).bool()
TURNS = torch.tensor([[0, 0, 2, 99], [7, -5, 10**9, 0], [1, 1, -1, 3]])
VALUES = torch.tensor([[1.0, 3.0, 5.0, math.nan], [math.nan] * 4, [-2.0, 6.0, 1e9, -math.inf]])


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("sum", [[4.0, 0.0, 5.0], [0.0, 0.0, 0.0], [0.0, 4.0, 0.0]]),
        ("mean", [[2.0, 0.0, 5.0], [0.0, 0.0, 0.0], [0.0, 2.0, 0.0]]),
        ("first", [[1.0, 0.0, 5.0], [0.0, 0.0, 0.0], [0.0, -2.0, 0.0]]),
        ("last", [[3.0, 0.0, 5.0], [0.0, 0.0, 0.0], [0.0, 6.0, 0.0]]),
    ],
)
def test_turn_pooling(how, expected):
    assert pool(VALUES, MASK, TURNS, "turn", 3, how).tolist() == expected


def test_trajectory_and_token_pooling():
    assert pool(VALUES, MASK, TURNS, "trajectory", 3, "sum").tolist() == [[9.0], [0.0], [4.0]]
    assert pool(VALUES, MASK, TURNS, "trajectory", 3, "mean").tolist() == [[3.0], [0.0], [2.0]]
    assert pool(VALUES, MASK, TURNS, "token", 3, "sum")[0].tolist() == [1.0, 3.0, 5.0, 0.0]


def test_existing_units():
    assert unit_mask(MASK, TURNS, "turn", 3).tolist() == [
        [True, False, True],
        [False] * 3,
        [False, True, False],
    ]
    assert unit_mask(MASK, TURNS, "trajectory", 3).tolist() == [[True], [False], [True]]
    assert torch.equal(unit_mask(MASK, TURNS, "token", 3), MASK)
    assert tokens_per_turn(MASK, TURNS, 3).tolist() == [[2, 0, 1], [0, 0, 0], [0, 2, 0]]


def test_edges_of_turns_that_touch():
    mask = torch.ones(1, 5).bool()
    turns = torch.tensor([[0, 0, 1, 2, 2]])
    assert edge_tokens(mask, turns, "first").tolist() == [[True, False, True, True, False]]
    assert edge_tokens(mask, turns, "last").tolist() == [[False, True, True, False, True]]


def test_spread_gives_each_token_its_turns_value():
    units = torch.tensor([[10.0, 20.0, 30.0], [1.0, 1.0, 1.0], [7.0, 8.0, 9.0]])
    assert spread(units, MASK, TURNS).tolist() == [[10, 10, 30, 0], [0, 0, 0, 0], [8, 8, 0, 0]]


def test_gradient_of_masked_entries_is_zero():
    for level, how in (("turn", "mean"), ("turn", "last"), ("trajectory", "mean"), ("token", "sum")):
        values = VALUES.clone().requires_grad_(True)
        pool(values, MASK, TURNS, level, 3, how).sum().backward()
        assert torch.isfinite(values.grad).all()
        assert (values.grad[~MASK] == 0).all()
        assert values.grad[MASK].abs().sum() > 0


def test_masked_mean_of_nothing_is_zero():
    assert float(masked_mean(VALUES, MASK)) == pytest.approx(13 / 5)
    assert float(masked_mean(VALUES, torch.zeros_like(MASK))) == 0.0
    assert zero_masked(VALUES, MASK)[1].tolist() == [0.0] * 4
