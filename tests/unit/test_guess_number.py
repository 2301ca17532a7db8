import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmppo.envs.guess_number import GuessNumber, demonstration, feasible_interval, parse_action
from llmppo.envs.scripted import play
from llmppo.errors import ConfigError, EnvironmentFault


def secret_of(seed: int, numbers: int) -> int:
    return int(GuessNumber(numbers).reset(seed=seed)[1]["task_id"])


def game(secret: int, **kwargs) -> GuessNumber:
    env = GuessNumber(**kwargs)
    env.reset(seed=next(s for s in range(10_000) if secret_of(s, env.numbers) == secret))
    return env


def test_a_game_from_rules_to_hit():
    env = game(9)
    assert env.rules == "Guess my number from 1 to 15 in 4 tries."
    assert env.step("[4]") == (
        "Higher.",
        0.0,
        False,
        False,
        {"success": False, "invalid": False, "task_id": "9"},
    )
    assert env.step("[12]")[:3] == ("Lower.", 0.0, False)
    assert env.step("nine")[:3] == ("Invalid.", -0.25, False)
    assert env.step("[9]") == (
        "Correct.",
        1.0,
        True,
        False,
        {"success": True, "invalid": False, "task_id": "9"},
    )
    with pytest.raises(EnvironmentFault, match="reset"):
        env.step("[9]")


def test_the_last_try_ends_the_game_as_a_loss():
    env = game(3, tries=2)
    assert not env.step("[1]")[2]
    feedback, reward, terminated, truncated, info = env.step("[16]")
    assert (feedback, reward, terminated, truncated) == ("Invalid.", -0.25, True, False)
    assert (info["invalid"], info["success"]) == (True, False)


@pytest.mark.parametrize(
    "text", ["[0]", "[16]", "[03]", "7", "[7", "7]", "[7][8]", "[7] ", " [7]\n", "", "[٣]"]
)
def test_only_bracketed_numbers_in_range_are_guesses(text):
    assert parse_action(text, 15) == (7 if text.strip() == "[7]" else None)


def test_the_secret_depends_on_the_seed_alone_and_covers_the_range():
    env = GuessNumber()
    secrets = [env.reset(seed=s)[1]["task_id"] for s in range(400)]
    assert secrets == [GuessNumber().reset(seed=s)[1]["task_id"] for s in range(400)]
    assert {int(s) for s in secrets} == set(range(1, 16))


def test_references_against_worked_values():
    # 3 numbers, 2 tries: a first guess of 2 always wins in the second try; 1 or 3 wins with 1/3 + 2/3 * 1/2.
    # (1 + 2/3 + 2/3) / 3 = 7/9.
    references = GuessNumber().references()
    assert references["random play"] == pytest.approx(1 - (14 / 15) ** 4)
    assert references["random play"] == pytest.approx(0.241, abs=5e-4)
    assert references["consistent play"] == pytest.approx(0.604, abs=5e-4)
    assert references["optimal play"] == 1.0
    assert GuessNumber(numbers=3, tries=2).references()["consistent play"] == pytest.approx(7 / 9)


@pytest.mark.parametrize(("numbers", "tries"), [(1, 1), (5, 2), (15, 4), (20, 3)])
def test_optimal_reference_is_the_best_of_all_policies(numbers, tries):
    @cache
    def best(n: int, left: int) -> float:  # expected number of secrets found among n candidates
        if n == 0 or left == 0:
            return 0
        return max(1 + best(g - 1, left - 1) + best(n - g, left - 1) for g in range(1, n + 1))

    assert GuessNumber(numbers, tries).references()["optimal play"] == pytest.approx(
        best(numbers, tries) / numbers
    )


@pytest.mark.parametrize("name", ["random play", "consistent play", "optimal play"])
def test_players_reach_their_references(name):
    env = GuessNumber()
    games = [play(env, env.players()[name], seed=s, rng=random.Random(s), max_turns=4) for s in range(2048)]
    measured = sum(g.success for g in games) / len(games)
    assert measured == pytest.approx(env.references()[name], abs=0.035)  # three standard errors
    assert all(g.episode_return == float(g.success) for g in games)


@given(st.integers(0, 2**63 - 1), st.lists(st.integers(-3, 20), min_size=1, max_size=4))
def test_the_feasible_interval_holds_the_secret_until_it_is_found(seed, guesses):
    env = GuessNumber()
    texts = [env.reset(seed=seed)[0]]
    for guess in guesses:
        feedback, _, terminated, _, _ = env.step(f"[{guess}]")
        texts += [f"[{guess}]", feedback]
        if terminated:
            break
        low, high = feasible_interval(texts, env.numbers)
        assert low <= env.secret <= high


def test_demonstrations_have_the_asked_mix():
    dialogues = [demonstration(random.Random(s)) for s in range(3000)]
    actions = [action for dialogue in dialogues for _, action in dialogue]
    malformed = sum(parse_action(a, 15) is None for a in actions) / len(actions)
    assert malformed == pytest.approx(0.05, abs=0.01)
    assert {dialogue[0][0] for dialogue in dialogues} == {GuessNumber().rules}
    assert max(map(len, dialogues)) == 4
    # No feedback is contradicted by a consistent player with a sound format.
    for seed in range(200):
        texts = []
        for observation, action in demonstration(random.Random(seed), players={"consistent": 1}, malformed=0):
            texts.append(observation)
            low, high = feasible_interval(texts, 15)
            assert low <= parse_action(action, 15) <= high
            texts.append(action)
    assert demonstration(random.Random(7)) == demonstration(random.Random(7))


def test_an_unknown_demonstrator_is_named():
    with pytest.raises(ConfigError, match=r"wise.*random, consistent, optimal"):
        demonstration(random.Random(0), players={"wise": 1.0})
