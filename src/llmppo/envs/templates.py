"""Token-exact framing: how environment texts become ids around replies that are never encoded again.

The first prompt is rendered once. After a reply, only the *feedback frame* is encoded: what the chat
template puts between the reply's last character and the next generation prompt, with the observation in
it. So the ids of a transcript are: prompt, sampled ids, frame, sampled ids, ... and BOS and the system
prompt stand once, at the start. Earlier replies stay as sampled, also where a template would rewrite them.
"""

import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

from llmppo.envs.protocol import Message
from llmppo.errors import RAISED_BY_USERS, LlmppoError, TemplateError

# Texts that no template and no environment contains, free of white space that a template could trim.
_USER, _REPLY, _FEEDBACK = "@@first-user-text@@", "@@assistant-reply-text@@", "@@feedback-text@@"

RENDER_S = 5.0  # CPU seconds for one text; templates take milliseconds

FrozenMessage = tuple[tuple[str, str], ...]


class Framer(Protocol):
    """Turns the texts of one episode into token ids."""

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of the first prompt, up to and including the generation prompt."""
        ...

    def feedback(self, observation: str | Sequence[Message], end_token: int | None) -> tuple[int, ...]:
        """Ids from the end of a reply to the next generation prompt; a text is one user message.

        `end_token` is the end token that the reply sampled last, None if the reply was cut: then the frame's
        own terminator is part of the ids, else it isn't repeated.
        """
        ...

    def check_feedback(self) -> None:
        """Raise TemplateError if a second turn can't be framed."""
        ...


class PlainFramer:
    """No template: texts are concatenated as they are; BOS comes from the tokenizer, once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._encode = lru_cache(maxsize=4096)(self._encode_text)

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(_joined(messages)))

    def feedback(self, observation: str | Sequence[Message], end_token: int | None) -> tuple[int, ...]:
        return self._encode(observation if isinstance(observation, str) else _joined(observation))

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def check_feedback(self) -> None:
        """Any text can follow a reply."""


class ChatFramer:
    """Frames by the tokenizer's chat template.

    `strict` refuses a template whose rendering of a finished turn doesn't begin with the prompt and the
    reply as the model saw them. Without it the frame is whatever follows the reply in the rendering.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any], strict: bool) -> None:
        if not tokenizer.chat_template:
            raise TemplateError(
                "the tokenizer has no chat template; set env.apply_chat_template: false, or add a chat_template to the model's tokenizer"
            )
        self._tokenizer, self._template_kwargs, self._strict = tokenizer, dict(template_kwargs), strict
        self._checked: set[tuple[str, ...]] = set()
        self._prompt = lru_cache(maxsize=4096)(self._encode_prompt)
        self._frame = lru_cache(maxsize=4096)(self._encode_frame)

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        return self._prompt(_frozen(messages))

    def _encode_prompt(self, messages: tuple[FrozenMessage, ...]) -> tuple[int, ...]:
        return self._encode(self._render([dict(message) for message in messages]))

    def feedback(self, observation: str | Sequence[Message], end_token: int | None) -> tuple[int, ...]:
        messages = [_user(observation)] if isinstance(observation, str) else observation
        return self._frame(_frozen(messages), end_token)

    def _encode_frame(self, messages: tuple[FrozenMessage, ...], end_token: int | None) -> tuple[int, ...]:
        answer = [dict(message) for message in messages]
        self.check_feedback([message["role"] for message in answer])
        rendered = self._render([*_EXCHANGE, *answer])
        # The observation comes after the reply, so the first occurrence is the reply's own.
        ids = self._encode(rendered[rendered.index(_REPLY) + len(_REPLY) :])
        if end_token in ids:
            terminator = ids.index(end_token)
            if not self._tokenizer.decode(ids[:terminator]).strip():
                return ids[terminator + 1 :]
        return ids

    def check_feedback(self, roles: Sequence[str] = ("user",)) -> None:
        """Raise TemplateError if messages of these roles can't follow a reply."""
        if tuple(roles) in self._checked:
            return
        answer = [{"role": role, "content": f"{_FEEDBACK}{n}@@"} for n, role in enumerate(roles)]
        prompt, rendered = self._render(_EXCHANGE[:1]), self._render([*_EXCHANGE, *answer])
        texts = [_REPLY, *(message["content"] for message in answer)]
        fault = None
        if any(rendered.count(text) != 1 for text in texts):
            fault = "it repeats or drops a message"
        elif sorted(texts, key=rendered.index) != texts:
            fault = "it puts the observation before the reply, or its messages in another order"
        if fault is None and self._strict and not rendered.startswith(prompt + _REPLY):
            raise TemplateError(
                "the chat template renders a finished turn differently from the prompt that the reply was sampled after:\n"
                f"  sampled after:       {prompt!r}\n"
                f"  rendered afterwards: {rendered[: len(prompt) + len(_REPLY)]!r}\n"
                "Change env.chat_template_kwargs so that they agree, or set env.strict_chat_template_boundary: false "
                "to keep the text that was sampled after and take only the following frame from the template"
            )
        if fault is not None:
            raise TemplateError(
                f"the chat template can't frame a second turn: {fault} when it renders user, assistant, {', '.join(roles)}. "
                "Let the environment answer with a plain text; or use env.max_turns: 1, env.apply_chat_template: false, "
                "or a tokenizer with a plain multi-turn template"
            )
        self._checked.add(tuple(roles))

    def _render(self, messages: list[Message]) -> str:
        from jinja2 import TemplateError as JinjaError
        from jinja2.sandbox import SecurityError

        try:
            with _limited(RENDER_S):
                return self._tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False, **self._template_kwargs
                )
        except (JinjaError, *RAISED_BY_USERS) as error:
            if isinstance(error, LlmppoError | SecurityError) or not isinstance(error, JinjaError):
                raise TemplateError(
                    f"the chat template of {self._tokenizer.name_or_path} can't be rendered: {type(error).__name__}: {error}. "
                    "Use another template, or set env.apply_chat_template: false"
                ) from error
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateError(
                f"the chat template refuses messages with the roles {roles}: {error}. "
                "If it knows no system role, drop env.system_prompt and put the text into the environment's first message; "
                "if it knows no tool role, let the environment answer with a plain text"
            ) from error

    def _encode(self, text: str) -> tuple[int, ...]:
        # The template writes BOS itself, so the tokenizer must not add one.
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End a template that loops: TimeoutError after so much CPU time.

    Only in a main thread, where Python hears signals, and not within an operation that is one step to Python.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(*_: object) -> None:
        raise TimeoutError(f"it is still at work after {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, late)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


_EXCHANGE: list[Message] = [_user(_USER), {"role": "assistant", "content": _REPLY}]


def _frozen(messages: Sequence[Message]) -> tuple[FrozenMessage, ...]:
    """Messages as a key of a cache."""
    return tuple(tuple(message.items()) for message in messages)


def _joined(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"] for message in messages)


def make_framer(
    tokenizer: Any,
    *,
    apply_chat_template: bool = True,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    strict: bool = True,
) -> Framer:
    """The framer of these settings; equal calls share one, and with it the encoded frames."""
    if not apply_chat_template:
        return _shared_plain(tokenizer)
    return _shared_chat(
        tokenizer,
        tokenizer.chat_template,
        json.dumps(dict(chat_template_kwargs or {}), sort_keys=True),
        strict,
    )


@lru_cache(maxsize=8)
def _shared_plain(tokenizer: Any) -> PlainFramer:
    return PlainFramer(tokenizer)


@lru_cache(maxsize=8)
def _shared_chat(tokenizer: Any, chat_template: str | None, template_kwargs: str, strict: bool) -> ChatFramer:
    return ChatFramer(tokenizer, json.loads(template_kwargs), strict)


def end_token_ids(
    tokenizer: Any, generation_config: Any = None, chat_template_kwargs: Mapping[str, Any] | None = None
) -> set[int]:
    """Ids that end a reply: the tokenizer's and the generation config's, and the template's turn terminator.

    The terminator counts when it is one special token (`<|im_end|>`, `<|eot_id|>`, `<end_of_turn>`), which
    need not be the tokenizer's EOS.
    """
    configured = getattr(generation_config, "eos_token_id", None)
    named = [tokenizer.eos_token_id, *(configured if isinstance(configured, (list, tuple)) else [configured])]
    ids: set[int] = {token for token in named if token is not None}
    if tokenizer.chat_template:
        framer = make_framer(tokenizer, chat_template_kwargs=chat_template_kwargs, strict=False)
        try:
            terminator = framer.feedback("", None)[:1]
        except TemplateError:  # a template for one turn only: replies end as tokenizer and config say
            terminator = ()
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        ids |= special & set(terminator)
    if not ids:
        raise TemplateError(
            "no end token: neither tokenizer nor generation config has an eos_token, and the chat template has no special terminator; set the tokenizer's eos_token"
        )
    return ids
