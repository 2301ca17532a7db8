"""What must not be written down: passwords in addresses, and what the environment keeps secret.

Secrets come from environment variables, which stages hand on and nothing stores. `redact` is for texts of others,
such as the errors of a tracker or of an environment, before they get into a log or a result.
"""

import os
import re
from urllib.parse import urlsplit

HIDDEN = "***"
SHORTEST = 8  # characters; shorter values stand in too many texts by chance
_SECRET_NAME = re.compile(r"(TOKEN|PASSWORD|PASSWD|SECRET|API_?KEY|ACCESS_KEY|ACCESS_KEY_ID)$", re.IGNORECASE)
_PASSWORD = re.compile(r"(\w://[^/@\s:]*:)[^@/\s]+(?=@)")
_ARGUMENT = re.compile(r"([?&](?:password|passwd|token|secret|api_?key)=)[^&\s#]+", re.IGNORECASE)


def secrets() -> dict[str, str]:
    """Environment variables that hold a secret by their names, longest value first."""
    found = {
        name: value
        for name, value in os.environ.items()
        if _SECRET_NAME.search(name) and len(value) >= SHORTEST
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def redact(text: str) -> str:
    """The text without passwords in addresses and without values of secret variables."""
    for value in secrets().values():
        text = text.replace(value, HIDDEN)
    return _ARGUMENT.sub(rf"\1{HIDDEN}", _PASSWORD.sub(rf"\1{HIDDEN}", text))


def holds_password(url: str) -> bool:
    """Whether an address has a password or token in it, or who logs in to a web server."""
    parts = urlsplit(url)
    user, at, _ = parts.netloc.rpartition("@")
    return redact(url) != url or bool(at and (":" in user or parts.scheme in ("http", "https")))
