"""What is taken out of texts before they are kept, and which addresses hold something to hide."""

import pytest

from llmppo.secrecy import holds_password, redact, secrets


def test_passwords_and_secrets_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in secrets():
        monkeypatch.delenv(name)
    monkeypatch.setenv("JUDGE_API_KEY", "sk-12345678")
    monkeypatch.setenv("OTHER_API_KEY", "sk-12345678-longer")
    monkeypatch.setenv("SHORT_TOKEN", "false")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "surely-not")
    assert redact("401: sk-12345678, sk-12345678-longer") == "401: ***, ***"
    assert redact("false, surely-not") == "false, surely-not"
    assert (
        redact("no https://me:pass@host/x?a=1&token=abc#y, or else")
        == "no https://me:***@host/x?a=1&token=***#y, or else"
    )
    assert redact("see https://host:80/a@b and 12:30") == "see https://host:80/a@b and 12:30"
    assert list(secrets()) == ["OTHER_API_KEY", "JUDGE_API_KEY"]  # the longest first


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://host:5000/mlflow", False),
        ("sqlite:///results/mlflow.db", False),
        ("postgresql://me@host/db", False),
        ("unix:/run/a.sock", False),
        ("https://me@host", True),
        ("https://me:pass@host", True),
        ("postgresql+psycopg2://me:pass@host:5432/db", True),
        ("mysql://host/db?password=pass", True),
    ],
)
def test_addresses_with_a_password(url: str, expected: bool) -> None:
    assert holds_password(url) is expected
