import random

import pytest

from llmppo.envs.grid_walk import MOVES, GridWalk, demonstration, split_pairs
from llmppo.envs.scripted import play
from llmppo.errors import ConfigError, EnvironmentFault


def started(cell, goal, **options):
    """A walk from `cell` to `goal`."""
    walk = GridWalk(**options)
    walk.reset(seed=0)
    walk.cell, walk.goal = cell, goal
    return walk


def test_moves_walls_and_arrival():
    walk = started((0, 0), (1, 1), size=3, moves=5)
    seen = [walk.step(action) for action in ("[left]", "[up]", "[right]")]
    assert [step[:4] for step in seen] == [
        ("At 0,0.", 0.0, False, False),
        ("At 0,1.", 0.0, False, False),
        ("Arrived.", 1.0, True, False),
    ]
    assert [step[4]["success"] for step in seen] == [False, False, True]
    with pytest.raises(EnvironmentFault, match="call reset first"):
        walk.step("[up]")


@pytest.mark.parametrize("text", ["up", "[up", "[UP]", "[up] [up]", ""])
def test_anything_else_costs_a_move(text):
    walk = started((0, 0), (2, 2), size=3, moves=2)
    observation, reward, over, _, info = walk.step(text)
    assert (observation, reward, over, info["invalid"]) == ("Invalid. At 0,0.", -0.25, False, True)
    assert walk.step("[up]")[2] is True


def test_splits_are_disjoint_and_follow_the_seed():
    train, held_out = split_pairs(4, 0.25)
    assert len(train) + len(held_out) == 16 * 15
    assert len(held_out) == 60
    assert not set(train) & set(held_out)
    tasks = {
        evaluation: {
            GridWalk(4, 6, 0.25).reset(seed=seed, evaluation=evaluation)[1]["task_id"] for seed in range(400)
        }
        for evaluation in (False, True)
    }
    assert not tasks[False] & tasks[True]
    assert len(tasks[True]) > 50
    assert GridWalk().reset(seed=3) == GridWalk().reset(seed=3)


def test_exact_references_agree_with_play():
    # Two cells in a row of a 2 x 2 grid: from 0,0 the goal 1,0 is hit by one move in four, else after a detour.
    walk = GridWalk(size=3, moves=4, held_out=0.5)
    exact = walk.references()
    assert exact["optimal play"] == 1.0
    for name, player in walk.players().items():
        games = [
            play(walk, player, seed=seed, rng=random.Random(seed), max_turns=4, evaluation=True)
            for seed in range(3000)
        ]
        assert sum(game.success for game in games) / 3000 == pytest.approx(exact[name], abs=0.028)


def test_random_success_of_one_move_by_hand():
    # A corner cell has two neighbours, each hit by one move of four; every other goal is out of reach.
    walk = GridWalk(size=2, moves=1, held_out=0.5)
    neighbours = sum(abs(a - c) + abs(b - d) == 1 for (a, b), (c, d) in walk.eval_pairs)
    share = neighbours / len(walk.eval_pairs)
    assert walk.references() == {
        "random play": pytest.approx(share / 4),
        "optimal play": pytest.approx(share),
    }


def test_demonstrations_walk_training_pairs_and_mix_players():
    rng = random.Random(1)
    walks = [demonstration(rng, players={"optimal": 1}, malformed=0) for _ in range(100)]
    assert all(action in MOVES for walk in walks for _, action in walk)
    held_out = {f"Walk from {a},{b} to {c},{d} in 10 moves." for (a, b), (c, d) in GridWalk().eval_pairs}
    assert not held_out & {walk[0][0] for walk in walks}
    assert max(map(len, walks)) <= 8  # the longest way on a 5 x 5 grid
    spoilt = [demonstration(rng, malformed=0.5) for _ in range(50)]
    assert any(action not in MOVES for walk in spoilt for _, action in walk)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"size": 1}, "size"),
        ({"moves": 0}, "moves"),
        ({"held_out": 0}, "held_out"),
        ({"held_out": 1}, "held_out"),
    ],
)
def test_bad_options_are_named(options, fault):
    with pytest.raises(ConfigError, match=fault):
        GridWalk(**options)
    with pytest.raises(ConfigError, match="no player `fast`"):
        demonstration(random.Random(0), players={"fast": 1})
