"""One episode between an environment, which speaks text, and an engine, which speaks token ids.

    harness.begin(spec)
    while (request := harness.request()) is not None:
        harness.advance(engine.generate([request])[0])
    episode = harness.episode()

The transcript only grows: prompt, sampled ids as they are, feedback frame, sampled ids, ... Seeds come from
the `EpisodeSpec`. A transcript without room for one more token ends the episode as truncated.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Self

import numpy as np

from llmppo.engines.base import Generation, GenerationRequest
from llmppo.envs.protocol import (
    Message,
    TextEnvironment,
    dataset_size,
    info_flag,
    json_info,
    reset_environment,
    step_environment,
)
from llmppo.envs.templates import Framer, make_framer
from llmppo.errors import TemplateError, TrajectoryError
from llmppo.files import digest
from llmppo.seeding import derive_seed
from llmppo.trajectories.episode import Episode, EpisodeSpec, StopReason, Turn


class RolloutHarness:
    """Drives one environment; `begin` starts the next episode on it."""

    def __init__(
        self,
        env: TextEnvironment,
        tokenizer: Any,
        framer: Framer,
        *,
        max_turns: int,
        pad_id: int | None,
        system_prompt: str | None,
        max_model_len: int,
        max_output_tokens: int | None,
        min_output_tokens: int | None,
        keep_final_observation: bool,
        success_threshold: float,
    ) -> None:
        self.env, self.tokenizer, self.framer = env, tokenizer, framer
        self.max_turns, self.pad_id, self.system_prompt = max_turns, pad_id, system_prompt
        self.max_model_len, self.max_output_tokens = max_model_len, max_output_tokens
        self.min_output_tokens = min_output_tokens or 0
        self.keep_final_observation, self.success_threshold = keep_final_observation, success_threshold
        self._spec: EpisodeSpec | None = None

    @classmethod
    def local(
        cls,
        env: TextEnvironment,
        tokenizer: Any,
        *,
        max_turns: int = 1,
        pad_id: int | None = None,
        apply_chat_template: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        system_prompt: str | None = None,
        max_model_len: int = 1024,
        max_output_tokens: int | None = None,
        min_output_tokens: int | None = None,
        strict_chat_template_boundary: bool = True,
        keep_final_observation: bool = False,
        success_threshold: float = 1.0,
    ) -> Self:
        """A harness around an environment of this process.

        Without `apply_chat_template` texts are concatenated as they are. `keep_final_observation` appends the
        feedback after a truncated last turn where it fits, as the state whose value is bootstrapped.
        """
        if system_prompt is not None and not apply_chat_template:
            raise TemplateError(
                "system_prompt needs apply_chat_template; put the text into the environment's first observation instead"
            )
        framer = make_framer(
            tokenizer,
            apply_chat_template=apply_chat_template,
            chat_template_kwargs=chat_template_kwargs,
            strict=strict_chat_template_boundary,
        )
        if max_turns > 1 or keep_final_observation:
            framer.check_feedback()
        return cls(
            env,
            tokenizer,
            framer,
            max_turns=max_turns,
            pad_id=pad_id,
            system_prompt=system_prompt,
            max_model_len=max_model_len,
            max_output_tokens=max_output_tokens,
            min_output_tokens=min_output_tokens,
            keep_final_observation=keep_final_observation,
            success_threshold=success_threshold,
        )

    @property
    def dataset_size(self) -> int | None:
        """Training rows of a dataset environment, None for a procedural one."""
        return dataset_size(self.env)

    def begin(self, spec: EpisodeSpec, *, row_index: int | None = None, evaluation: bool = False) -> None:
        """Reset the environment and render the prompt."""
        seed = derive_seed(spec.seed, spec.split, spec.iteration, spec.index)
        arguments = {"seed": seed, "row_index": row_index, "evaluation": evaluation}
        reset = reset_environment(self.env, spec.episode_id, arguments)
        messages = reset.messages
        if self.system_prompt is not None:
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        self._spec = spec
        self._observation = _readable(reset.messages)
        self._info: Mapping[str, Any] = {"task_id": digest(reset.messages), **reset.info}
        self._step_info: Mapping[str, Any] = {}
        self._tokens = list(self.framer.prompt(messages))
        self._turns: list[Turn] = []
        self._logprobs: list[np.ndarray] = []
        self._supports: list[np.ndarray | None] = []
        self._terminated = False
        self._over = len(self._tokens) >= self.max_model_len
        if not self._tokens:
            raise TemplateError(
                f"{spec.episode_id}: the prompt has no tokens; the environment's first observation must not be empty without a chat template"
            )

    def request(self) -> GenerationRequest | None:
        """What to sample next; None when the episode is over."""
        spec = self._started()
        if self._over:
            return None
        room = self.max_model_len - len(self._tokens)
        most = room if self.max_output_tokens is None else min(room, self.max_output_tokens)
        return GenerationRequest(
            token_ids=self._tokens,
            seed=derive_seed(spec.seed, spec.split, spec.iteration, spec.index, "turn", len(self._turns)),
            max_new_tokens=most,
            min_new_tokens=min(self.min_output_tokens, most),
        )

    def advance(self, generation: Generation) -> None:
        """Append the reply, let the environment judge it, and frame its answer."""
        spec = self._started()
        reply = generation.token_ids
        start = len(self._tokens)
        if self._over or start + len(reply) > self.max_model_len or len(generation.logprobs) != len(reply):
            raise TrajectoryError(
                f"{spec.episode_id}: a reply of {len(reply)} tokens and {len(generation.logprobs)} log-probs after "
                f"{start} of {self.max_model_len} tokens{' in an episode that is over' if self._over else ''}; the engine must answer `request()`"
            )
        self._tokens = self._tokens + list(reply)
        self._logprobs.append(generation.logprobs)
        self._supports += generation.supports or [None] * len(reply)
        action = self.tokenizer.decode(reply, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        step = step_environment(self.env, spec.episode_id, action)
        self._turns.append(
            Turn(
                start=start,
                end=len(self._tokens),
                reward=step.reward,
                stop_reason=self._stop_reason(generation),
                invalid=bool(info_flag(self.env, spec.episode_id, step.info, "invalid")),
                observation=self._observation,
                action=action,
            )
        )
        self._observation = step.observation
        self._info = {**self._info, **step.info}
        self._step_info = step.info
        self._terminated = step.terminated
        self._over = step.terminated or step.truncated or len(self._turns) == self.max_turns
        if not step.terminated and (not self._over or self.keep_final_observation):
            ended = generation.stop_reason is StopReason.EOS
            feedback = self.framer.feedback(step.observation, reply[-1] if ended and reply else None)
            length = len(self._tokens) + len(feedback)
            if length >= self.max_model_len:
                self._over = True
            if not self._over or (self.keep_final_observation and length <= self.max_model_len):
                self._tokens = self._tokens + list(feedback)

    def episode(self) -> Episode:
        """The finished episode."""
        spec = self._started()
        if not self._over:
            raise TrajectoryError(f"{spec.episode_id} isn't over: `request()` still asks for a reply")
        logprobs = np.concatenate([np.zeros(0), *self._logprobs]).astype(np.float32)
        info = {key: value for key, value in self._info.items() if key not in ("invalid", "task_id")}
        return Episode(
            spec=spec,
            task_id=str(self._info["task_id"]),
            token_ids=np.array(self._tokens, np.int32),
            sampling_logprobs=logprobs,
            sampling_supports=self._supports if any(s is not None for s in self._supports) else None,
            turns=tuple(self._turns),
            terminated=self._terminated,
            truncated=not self._terminated,
            success=self._success(spec),
            info=json_info(self.env, spec.episode_id, info),
        )

    def close(self) -> None:
        """Release the environment, where it has a `close`."""
        close = getattr(self.env, "close", None)
        if close is not None:
            close()

    def _started(self) -> EpisodeSpec:
        if self._spec is None:
            raise TrajectoryError("no episode has begun on this harness; call `begin(spec)` first")
        return self._spec

    def _stop_reason(self, generation: Generation) -> StopReason:
        if (
            generation.stop_reason is StopReason.LENGTH
            and len(generation.token_ids) != self.max_output_tokens
        ):
            return StopReason.CONTEXT
        return generation.stop_reason

    def _success(self, spec: EpisodeSpec) -> bool:
        """The last step's word for it, else the return against the threshold. No reply, no success."""
        if not self._turns:
            return False
        said = info_flag(self.env, spec.episode_id, self._step_info, "success", "correct")
        total = sum(turn.reward for turn in self._turns)
        return total >= self.success_threshold if said is None else said


def _readable(messages: list[Message]) -> str:
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


@lru_cache(maxsize=16)
def _permutation(seed: int, split: str, epoch: int, size: int) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64(derive_seed(seed, split, "rows", epoch)))
    return generator.permutation(size)


def row_for(seed: int, split: str, n: int, size: int) -> int:
    """Dataset row of the n-th training episode: every epoch visits each of `size` rows once, reshuffled."""
    epoch, position = divmod(n, size)
    return int(_permutation(seed, split, epoch, size)[position])
