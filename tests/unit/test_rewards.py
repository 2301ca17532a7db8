import pytest

from llmppo.envs.rewards import contains_answer, exact_match, number_choice, numbers_in


@pytest.mark.parametrize(
    ("completion", "reward"),
    [("Paris", 1.0), (" paris.\n", 1.0), ("It is Paris", 0.0), ("Par is", 0.0), ("", 0.0)],
)
def test_exact_match_ignores_case_spaces_and_end_punctuation(completion, reward):
    assert exact_match(completion, "Paris", "Capital of France?") == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("The capital is Paris.", "Paris", 1.0),
        ("parisian", "Paris", 0.0),
        ("It's 14", "4", 0.0),
        ("It's 4.", "4", 1.0),
        ("New\nYork City", "new york", 1.0),
        ("a+b", "a+b", 1.0),
        ("aab", "a+b", 0.0),
    ],
)
def test_contains_answer_wants_whole_words(completion, answer, reward):
    assert contains_answer(completion, answer, "?") == reward


@pytest.mark.parametrize(
    ("completion", "reward", "invalid"),
    [
        ("57", 1.0, False),
        (" 57.", 1.0, False),
        ("12", 0.0, False),
        ("57 is larger", -0.5, True),
        ("5", -0.5, True),
        ("", -0.5, True),
        ("58", -0.5, True),
    ],
)
def test_number_choice_tells_wrong_from_invalid(completion, reward, invalid):
    result = number_choice(completion, "57", "Larger of 12 and 57?")
    assert result == (reward, {"success": reward == 1.0, "invalid": invalid})


def test_choices_of_a_question():
    assert number_choice.choices("Larger of 12 and -3.5?") == ["12", "-3.5"]
    assert numbers_in("7 or 7?") == ["7"]
