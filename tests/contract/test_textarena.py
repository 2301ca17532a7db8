"""The adapter against the real library."""

import json
import random

import numpy as np
import pytest

pytest.importorskip("textarena", reason="install it with: make tasks")

from llmppo.envs.scripted import play
from llmppo.envs.textarena_env import TextArena, demonstration
from llmppo.envs.textarena_players import secretary
from llmppo.errors import ConfigError, EnvironmentFault
from llmppo.stages import baselines

GAMES = (
    "Blackjack-v0", "FrozenLake-v0", "GuessTheNumber-v0-hardcore", "LightsOut-v0", "Mastermind-v0", "Secretary-v0",
    "Sokoban-v0", "Sudoku-v0-easy", "ThreeCardMonte-v0",
)  # fmt: skip
ACTIONS = ["[accept]", "[continue]"]
OPPONENT = "llmppo.envs.textarena_env:random_listed_move"


def secret_reply(env: TextArena) -> str:
    """The winning move of a game whose state holds it."""
    state = env._game.state.game_state
    if env.game.startswith("Mastermind"):
        return f"[{' '.join(map(str, state['secret_code']))}]"
    if env.game.startswith("GuessTheNumber"):
        return f"[{state['game_number']}]"
    draws, shown = state["draws"], state["current_idx"]
    return "[accept]" if draws[shown - 1] == max(draws) else "[continue]"


@pytest.mark.parametrize("game", ["Mastermind-v0", "GuessTheNumber-v0", "Secretary-v0"])
def test_golden_play_scores_one_and_garbage_nothing(game):
    for seed in range(10):
        env = TextArena(game, held_out=0)
        env.reset(seed=seed)
        over, total = False, 0.0
        while not over:
            _, reward, over, truncated, info = env.step(secret_reply(env))
            total += reward
        assert (total, truncated, info["success"], info["invalid"]) == (1.0, False, True, False)
        env.reset(seed=seed)
        first, second = env.step("garbage"), env.step("garbage")
        assert first[1:3] == (0.0, False)
        assert second[1:3] == (-1.0, True)
        assert [step[4]["success"] for step in (first, second)] == [False, False]
        assert [step[4]["invalid"] for step in (first, second)] == [True, True]


def test_partial_progress_is_not_paid_for_breaking_off():
    """The library pays a guess near the number also when an invalid move ends the game."""
    env = TextArena("GuessTheNumber-v0", held_out=0, invalid_reward=-0.5)
    env.reset(seed=1)
    near = env._game.state.game_state["game_number"] % 20 + 1
    assert env.step(f"[{near}]")[4] == {"success": False, "invalid": False, "task_id": env._instance}
    env.step("?")
    assert env.step("?")[1:3] == (-0.5, True)


def test_one_slip_is_forgiven_and_counted_afresh():
    env = TextArena("Secretary-v0")
    env.reset(seed=0)
    assert env.step("garbage")[4]["invalid"] is True
    assert env.step("[continue]")[4]["invalid"] is False
    observation, _, over, _, info = env.step("garbage")
    assert (over, info["invalid"]) == (False, True)
    assert "invalid move" in observation


@pytest.mark.parametrize("game", GAMES)
def test_games_follow_their_seed_and_leave_global_randomness_alone(game):
    random.seed(3)
    np.random.seed(3)
    states = random.getstate(), np.random.get_state()[1].tolist()
    transcripts = []
    for _ in range(2):
        env = TextArena(game, held_out=0)
        steps = [env.reset(seed=11)]
        while not steps[-1][2:3] or not steps[-1][2]:
            steps.append(env.step("[1] [hit] [continue]"))
            if len(steps) > 4:
                break
        transcripts.append(steps)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == states
        random.seed(3)
    assert transcripts[0] == transcripts[1]
    assert TextArena(game, held_out=0).reset(seed=11) == transcripts[0][0]


def test_interleaved_episodes_don_t_share_draws():
    """Each episode's cards come from its own random state, whoever plays in between."""

    def hands(env):
        return [env.step("[Stand]")[0] for _ in range(4)]

    alone = TextArena("Blackjack-v0")
    alone.reset(seed=1)
    expected = hands(alone)
    first, other = TextArena("Blackjack-v0"), TextArena("Blackjack-v0")
    first.reset(seed=1)
    other.reset(seed=2)
    found = []
    for _ in range(4):
        found += [first.step("[Stand]")[0]]
        other.step("[Hit]")
    assert found == expected


def test_an_episode_sees_nothing_of_the_one_before():
    env = TextArena("Secretary-v0")
    env.reset(seed=1)
    env.step("[continue]")
    again, _ = env.reset(seed=2)
    assert again == TextArena("Secretary-v0").reset(seed=2)[0]
    assert again.count("The current value is") == 1
    assert "[continue]" not in env.step("[continue]")[0]  # nor its own moves


@pytest.mark.parametrize("game", ["Secretary-v0", "Mastermind-v0", "Blackjack-v0"])
def test_training_and_evaluation_share_no_instance(game):
    tasks = {}
    for evaluation in (False, True):
        env = TextArena(game)
        tasks[evaluation] = {env.reset(seed=seed, evaluation=evaluation)[1]["task_id"] for seed in range(150)}
    assert len(tasks[True]) > 30
    assert not tasks[False] & tasks[True]


def test_a_game_with_one_start_cannot_be_split_but_played():
    env = TextArena("TicTacToe-v0", opponent=OPPONENT)
    only_split = int(env._start(0), 16) / 16**12 < env.held_out
    with pytest.raises(EnvironmentFault, match="held_out: 0"):
        env.reset(seed=1, evaluation=not only_split)
    assert "no instance" in TextArena("TicTacToe-v0", opponent=OPPONENT, held_out=0).notes()[0]


def test_an_opponent_plays_its_turns_and_its_win_is_a_loss():
    outcomes = set()
    for seed in range(40):
        env = TextArena("TicTacToe-v0", opponent=OPPONENT, held_out=0)
        text, _ = env.reset(seed=seed)
        over, moves, rng = False, 0, random.Random(seed)
        while not over:
            free = [word.strip("',") for word in text.splitlines()[-1].split() if "[" in word]
            assert len(free) == 9 - 2 * moves
            text, reward, over, _, info = env.step(rng.choice(free))
            moves += 1
        assert info["success"] == (reward == 1.0)
        outcomes.add(reward)
    assert outcomes >= {1.0, -1.0}


def test_optimal_play_of_secretary_reaches_its_known_rate():
    """0.6392 for five draws with full information (Gilbert and Mosteller, 1966); 0.2 for taking any one."""
    env = TextArena("Secretary-v0")
    games = [play(env, secretary, seed=seed, rng=random.Random(seed), max_turns=10) for seed in range(2000)]
    assert sum(game.success for game in games) / 2000 == pytest.approx(0.639, abs=0.033)


def test_floors_are_measured_by_the_rule(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "EPISODES", 1000)
    kwargs = {
        "game": "Secretary-v0",
        "actions": ACTIONS,
        "players": {"optimal play": "llmppo.envs.textarena_players:secretary"},
    }
    env = {"factory": "llmppo.envs.textarena_env:TextArena", "kwargs": kwargs, "max_turns": 10}
    baselines.run({"env": env}, out=tmp_path / "b.json")
    measured = {
        name: value["success_rate"]
        for name, value in json.loads((tmp_path / "b.json").read_text())["measured"].items()
    }
    assert measured["best constant reply"] == pytest.approx(0.2, abs=0.04)
    assert measured["random play"] == pytest.approx(0.2, abs=0.04)
    assert measured["optimal play"] == pytest.approx(0.639, abs=0.05)


def test_demonstrations_play_training_games():
    rng = random.Random(0)
    games = [demonstration(rng, "Secretary-v0", ACTIONS) for _ in range(60)]
    assert {reply for game in games for _, reply in game} == set(ACTIONS)
    assert all(game[-1][1] == "[accept]" or len(game) == 5 for game in games)
    optimal = "llmppo.envs.textarena_players:secretary"
    skilled = [demonstration(rng, "Secretary-v0", ["?"], player=optimal, skilled=0.5) for _ in range(60)]
    assert 15 < sum(game[0][1] != "?" for game in skilled) < 45
    spoilt = [demonstration(rng, "Secretary-v0", ACTIONS, malformed=1.0) for _ in range(3)]
    assert all(len(game) == 2 for game in spoilt)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"game": "Secretery-v0"}, "can't start 'Secretery-v0'"),
        ({"game": "Secretary-v0", "settings": {"M": 3}}, "can't start .*M"),
        ({"game": "Secretary-v0", "held_out": 1}, "held_out: 1"),
        ({"game": "TicTacToe-v0"}, "with {} and 1 players"),
        ({"game": "Wordle-v0"}, "word lists"),
        ({"game": "RushHour-v0"}, "no seed reaches"),
        ({"game": "Secretary-v0", "players": {"x": "no_such:f"}}, r"env.kwargs.players.x: no module"),
    ],
)
def test_bad_options_are_named(options, fault):
    with pytest.raises(ConfigError, match=fault):
        TextArena(**options)
