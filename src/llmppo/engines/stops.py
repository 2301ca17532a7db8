"""Stop strings: texts that end a reply once its tokens spell them.

An engine works on ids, and one string has many spellings; so the end of the reply is decoded after each token.
"""

from collections.abc import Sequence
from typing import Any

from llmppo.config import SamplingConfig
from llmppo.errors import ConfigError


class StopStrings:
    """Tells whether the newest token of a reply completes one of the texts."""

    def __init__(self, stop: Sequence[str], tokenizer: Any) -> None:
        self._stop, self._tokenizer = tuple(stop), tokenizer
        # A token adds a byte or more, so a text of n bytes spans n tokens at most; the rest is for a first
        # character that begins before them.
        self._window = max(len(text.encode()) for text in stop) + 4

    def completed(self, reply: Sequence[int]) -> bool:
        """Whether a text ends in what the last of `reply` adds; one that ended earlier doesn't count."""
        tail = list(reply[-self._window :])
        # The character whose bytes aren't complete yet is decoded as U+FFFD.
        before, after = self._decode(tail[:-1]).rstrip("\ufffd"), self._decode(tail)
        return any(text in after[max(0, len(before) - len(text) + 1) :] for text in self._stop)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def stop_strings(sampling: SamplingConfig, tokenizer: Any) -> StopStrings | None:
    """The stop strings of a config section, None without any. Raises ConfigError where they lack a tokenizer."""
    if not sampling.stop:
        return None
    if tokenizer is None:
        raise ConfigError(
            "`stop` needs the tokenizer; give it to the agent by `listen_for_end_of(tokenizer)`"
        )
    return StopStrings(sampling.stop, tokenizer)
