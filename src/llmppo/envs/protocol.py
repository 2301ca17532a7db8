"""The text-environment protocol: Gymnasium's shape with strings, checked at the border.

    reset(seed=...) -> (observation, info)
    step(text) -> (observation, reward, terminated, truncated, info)

`reset` may also take `row_index` (of a dataset) and `evaluation`; only names in its signature are passed.
An observation is a text (one user message) or a list of chat messages; what `step` returns may hold `tool`
messages, but no `assistant` ones: those are sampled. `info` may hold `success` or `correct` and `invalid`
(bools) and `task_id`. Optional attributes: `dataset_size`, `close`, and `concurrent = False` for an
environment whose calls share state with those of other instances. Anything else is an EnvironmentFault.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from llmppo.errors import RAISED_BY_USERS, EnvironmentFault, LlmppoError

Message = dict[str, str]
"""A chat message: `role` and `content`, and where a template reads them `name` and `tool_call_id`."""

MESSAGE_KEYS = frozenset({"role", "content"})
OPTIONAL_MESSAGE_KEYS = frozenset({"name", "tool_call_id"})

RESET_ARGUMENTS = ("seed", "row_index", "evaluation")


class TextEnvironment(Protocol):
    """One episode at a time; all randomness comes from the seed of `reset`."""

    @property
    def reset(self) -> Callable[..., tuple[str | Sequence[Message], Mapping[str, Any]]]: ...

    def step(
        self, action: str, /
    ) -> tuple[str | Sequence[Message], float, bool, bool, Mapping[str, Any]]: ...


@dataclass(frozen=True, kw_only=True)
class Reset:
    """The start of an episode: chat messages (a plain text is one user message) and the environment's info."""

    messages: list[Message]
    info: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the environment said to one reply. The reward has the precision of the trajectory files."""

    messages: list[Message]
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]

    @property
    def observation(self) -> str:
        """The messages as one text."""
        return readable(self.messages)


def readable(messages: Sequence[Message]) -> str:
    """The content of a single message; several as lines `role: content`."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def environment_name(env: Any) -> str:
    return f"{type(env).__module__}.{type(env).__qualname__}"


def accepted_reset_arguments(env: Any) -> tuple[str, ...]:
    """Names among RESET_ARGUMENTS that `env.reset` takes; all of them if it has `**kwargs`."""
    parameters = inspect.signature(env.reset).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return RESET_ARGUMENTS
    return tuple(
        name
        for name in RESET_ARGUMENTS
        if name in parameters and parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY
    )


def dataset_size(env: Any) -> int | None:
    """The environment's number of training rows; None for a procedural environment."""
    size = getattr(env, "dataset_size", None)
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 1:
        raise EnvironmentFault(
            f"{environment_name(env)}: dataset_size is {size!r}; it is a number of rows >= 1"
        )
    return int(size)


def reset_environment(env: Any, episode: str, arguments: Mapping[str, Any]) -> Reset:
    """Reset with those of `arguments` that `env.reset` accepts. Raises EnvironmentFault naming `episode`."""
    accepted = accepted_reset_arguments(env)
    result = _call(
        env, episode, "reset", **{name: value for name, value in arguments.items() if name in accepted}
    )
    if not isinstance(result, tuple) or len(result) != 2:
        raise _fault(env, episode, f"reset returned {_shape(result)}; it returns (observation, info)")
    observation, info = result
    return Reset(
        messages=_messages(env, episode, "reset", observation), info=_info(env, episode, "reset", info)
    )


def step_environment(env: Any, episode: str, action: str) -> Step:
    """Hand one reply to the environment. Raises EnvironmentFault naming `episode`."""
    result = _call(env, episode, "step", action)
    if not isinstance(result, tuple) or len(result) != 5:
        raise _fault(
            env,
            episode,
            f"step returned {_shape(result)}; it returns (observation, reward, terminated, truncated, info)",
        )
    observation, reward, terminated, truncated, info = result
    messages = _messages(env, episode, "step", observation)
    if any(message["role"] == "assistant" for message in messages):
        raise _fault(
            env,
            episode,
            "step returned an assistant message; the policy's replies are the only ones after the start",
        )
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            raise _fault(env, episode, f"step returned {flag!r} as `{name}`; it is True or False")
    return Step(
        messages=messages,
        reward=_reward(env, episode, reward),
        terminated=bool(terminated),
        truncated=bool(truncated),
        info=_info(env, episode, "step", info),
    )


def close_environment(env: Any, episode: str) -> None:
    """Call `env.close`, where there is one. Raises EnvironmentFault naming `episode`."""
    if getattr(env, "close", None) is not None:
        _call(env, episode, "close")


def info_flag(env: Any, episode: str, info: Mapping[str, Any], *names: str) -> bool | None:
    """The first of `names` that `info` holds, as a bool; None if it holds none of them."""
    for name in names:
        if name in info:
            value = info[name]
            if isinstance(value, (bool, np.bool_)) or (isinstance(value, numbers.Real) and value in (0, 1)):
                return bool(value)
            raise _fault(env, episode, f"info[{name!r}] is {value!r}; it is True or False")
    return None


def json_info(env: Any, episode: str, info: Mapping[str, Any]) -> dict[str, Any]:
    """`info` as plain JSON values: numpy becomes Python, a non-finite number null, keys strings."""

    def convert(value: Any, path: str) -> Any:
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, np.generic):
            return convert(value.item(), path)
        if isinstance(value, np.ndarray):
            return convert(value.tolist(), path)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else None
        if isinstance(value, Mapping):
            return {str(key): convert(entry, f"{path}[{key!r}]") for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [convert(entry, f"{path}[{number}]") for number, entry in enumerate(value)]
        raise _fault(
            env,
            episode,
            f"{path} is a {type(value).__name__}; info is stored as JSON, so turn it into text or numbers",
        )

    return {str(key): convert(value, f"info[{key!r}]") for key, value in info.items()}


def _call(env: Any, episode: str, method: str, *arguments: Any, **keywords: Any) -> Any:
    try:
        return getattr(env, method)(*arguments, **keywords)
    except LlmppoError:
        raise
    except RAISED_BY_USERS as error:
        raise _fault(env, episode, f"{method} raised {type(error).__name__}: {error}") from error


def _fault(env: Any, episode: str, what: str) -> EnvironmentFault:
    return EnvironmentFault(f"{environment_name(env)}, episode {episode}: {what}")


def _shape(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _text(env: Any, episode: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _fault(env, episode, f"an observation isn't valid Unicode text ({error.reason})") from error
    return text


def _messages(env: Any, episode: str, method: str, observation: Any) -> list[Message]:
    if isinstance(observation, str):
        return [{"role": "user", "content": _text(env, episode, observation)}]
    expected = "a text, or a list of messages {'role': ..., 'content': ...}"
    if not isinstance(observation, (list, tuple)) or not observation:
        given = "an empty list" if isinstance(observation, list) and not observation else _shape(observation)
        raise _fault(env, episode, f"{method} returned {given} as observation; it is {expected}")
    messages = []
    for number, message in enumerate(observation):
        if (
            not isinstance(message, Mapping)
            or not set(message) >= MESSAGE_KEYS
            or not set(message) <= MESSAGE_KEYS | OPTIONAL_MESSAGE_KEYS
            or not all(isinstance(value, str) for value in message.values())
        ):
            raise _fault(
                env, episode, f"message {number} of {method}'s observation is {message!r}; it is {expected}"
            )
        messages.append({key: _text(env, episode, value) for key, value in message.items()})
    return messages


def _reward(env: Any, episode: str, reward: Any) -> float:
    if not isinstance(reward, (numbers.Real, np.bool_)):
        raise _fault(env, episode, f"step returned {reward!r} as reward; it must be a finite number")
    try:
        with np.errstate(over="ignore"):
            stored = float(np.float32(reward))
    except OverflowError:  # an integer of hundreds of digits
        stored = math.inf
    if not math.isfinite(stored):
        raise _fault(
            env,
            episode,
            f"step returned a reward of {reward!r:.40}; it must be a finite number of at most 3.4e38",
        )
    return stored


def _info(env: Any, episode: str, method: str, info: Any) -> Mapping[str, Any]:
    if not isinstance(info, Mapping):
        raise _fault(env, episode, f"{method} returned {_shape(info)} as info; it is a mapping")
    return info
