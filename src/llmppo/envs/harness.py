"""One episode between an environment, which speaks text, and an engine, which speaks token ids.

    harness.begin(spec)
    while (request := harness.request()) is not None:
        harness.advance(engine.generate([request])[0])
    episode = harness.episode()

The transcript only grows: prompt, sampled ids as they are, feedback frame, sampled ids, ... Seeds come from
the `EpisodeSpec`. A transcript without room for one more token ends the episode as truncated, or with
`restart_keep_turns` starts a new segment: a fresh prompt of the first messages and the latest turns, after which
the model sees nothing of the tokens before.

`begin` is `enter(opening(spec)())` and `advance` is `observe(answering(generation)())`: the calls that
`opening` and `answering` return only touch the environment, so they may run in another thread.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Self

import numpy as np

from llmppo.engines.base import Generation, GenerationRequest
from llmppo.envs.protocol import (
    Message,
    Reset,
    Step,
    TextEnvironment,
    close_environment,
    dataset_size,
    info_flag,
    json_info,
    readable,
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
        restart_keep_turns: int | None,
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
        self.restart_keep_turns = restart_keep_turns
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
        restart_keep_turns: int | None = None,
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
        if restart_keep_turns is not None and not apply_chat_template:
            raise TemplateError("restart_keep_turns needs apply_chat_template, which tells turns apart")
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
            restart_keep_turns=restart_keep_turns,
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
        self.enter(self.opening(spec, row_index=row_index, evaluation=evaluation)())

    def opening(
        self, spec: EpisodeSpec, *, row_index: int | None = None, evaluation: bool = False
    ) -> Callable[[], Reset]:
        """Start an episode: the call that resets the environment, whose result `enter` takes."""
        seed = derive_seed(spec.seed, spec.split, spec.iteration, spec.index)
        arguments = {"seed": seed, "row_index": row_index, "evaluation": evaluation}
        self._spec = spec
        self._observation = ""
        self._info: Mapping[str, Any] = {"task_id": ""}
        self._step_info: Mapping[str, Any] = {}
        self._tokens: list[int] = []  # of all segments
        self._segment_starts = [0]
        self._opening_messages: list[Message] = []
        self._answers: list[list[Message]] = []  # reply and observation of each turn
        self._turns: list[Turn] = []
        self._logprobs: list[np.ndarray] = []
        self._supports: list[np.ndarray | None] = []
        self._terminated = self._over = False
        self._generation: Generation | None = None
        env = self.env
        return lambda: reset_environment(env, spec.episode_id, arguments)

    def enter(self, reset: Reset) -> None:
        """Render the prompt of the episode that `opening` began."""
        spec, messages = self._started(), reset.messages
        if self.system_prompt is not None:
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        self._observation = readable(reset.messages)
        self._opening_messages = messages
        self._info = {"task_id": digest(reset.messages), **reset.info}
        self._tokens = list(self.framer.prompt(messages))
        self._over = len(self._tokens) >= self.max_model_len
        if not self._tokens:
            raise TemplateError(
                f"{spec.episode_id}: the prompt has no tokens; the environment's first observation must not be empty without a chat template"
            )

    @property
    def on_last_turn(self) -> bool:
        """Whether no turn can follow the one that is to be sampled."""
        return len(self._turns) + 1 >= self.max_turns

    def request(self) -> GenerationRequest | None:
        """What to sample next; None when the episode is over."""
        spec = self._started()
        if self._over:
            return None
        context = self._tokens[self._segment_starts[-1] :]
        room = self.max_model_len - len(context)
        most = room if self.max_output_tokens is None else min(room, self.max_output_tokens)
        return GenerationRequest(
            token_ids=context,
            seed=derive_seed(spec.seed, spec.split, spec.iteration, spec.index, "turn", len(self._turns)),
            max_new_tokens=most,
            min_new_tokens=min(self.min_output_tokens, most),
        )

    def advance(self, generation: Generation) -> None:
        """Append the reply, let the environment judge it, and frame its answer."""
        self.observe(self.answering(generation)())

    def answering(self, generation: Generation) -> Callable[[], Step]:
        """The call that hands the reply to the environment; `observe` takes its result."""
        spec = self._started()
        reply = generation.token_ids
        start = len(self._tokens) - self._segment_starts[-1]
        if self._over or start + len(reply) > self.max_model_len or len(generation.logprobs) != len(reply):
            raise TrajectoryError(
                f"{spec.episode_id}: a reply of {len(reply)} tokens and {len(generation.logprobs)} log-probs after "
                f"{start} of {self.max_model_len} tokens{' in an episode that is over' if self._over else ''}; the engine must answer `request()`"
            )
        self._generation = generation
        self._action = self.tokenizer.decode(
            reply, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        env, action = self.env, self._action
        return lambda: step_environment(env, spec.episode_id, action)

    def observe(self, step: Step) -> None:
        """Append the reply that the environment judged, and frame its answer."""
        spec, generation = self._started(), self._generation
        if generation is None:
            raise TrajectoryError(
                f"{spec.episode_id}: no reply waits for a judgement; call `answering` first"
            )
        invalid = bool(info_flag(self.env, spec.episode_id, step.info, "invalid"))
        self._generation = None
        reply, start = generation.token_ids, len(self._tokens)
        self._tokens = self._tokens + list(reply)
        self._logprobs.append(generation.logprobs)
        self._supports += generation.supports or [None] * len(reply)
        self._turns.append(
            Turn(
                start=start,
                end=len(self._tokens),
                reward=step.reward,
                stop_reason=self._stop_reason(generation),
                invalid=invalid,
                observation=self._observation,
                action=self._action,
            )
        )
        self._observation = step.observation
        self._answers.append([{"role": "assistant", "content": self._action}, *step.messages])
        self._info = {**self._info, **step.info}
        self._step_info = step.info
        self._terminated = step.terminated
        self._over = step.terminated or step.truncated or len(self._turns) == self.max_turns
        if not step.terminated and (not self._over or self.keep_final_observation):
            ended = generation.stop_reason is StopReason.EOS
            feedback = self.framer.feedback(step.messages, reply[-1] if ended and reply else None)
            length = len(self._tokens) - self._segment_starts[-1] + len(feedback)
            if length >= self.max_model_len and not self._over:
                prompt = self._restart()
                if prompt is not None:
                    self._segment_starts.append(len(self._tokens))
                    self._tokens = self._tokens + prompt
                    return
                self._over = True
            if not self._over or (self.keep_final_observation and length <= self.max_model_len):
                self._tokens = self._tokens + list(feedback)

    def _restart(self) -> list[int] | None:
        """The prompt of a new segment that leaves room for a reply; None if restarts are off or none fits."""
        for turns in range(min(self.restart_keep_turns or 0, len(self._answers)), 0, -1):
            latest = [message for answer in self._answers[-turns:] for message in answer]
            prompt = list(self.framer.prompt([*self._opening_messages, *latest]))
            if len(prompt) + (self.max_output_tokens or 1) <= self.max_model_len:
                return prompt
        return None

    def episode(self, failure: str | None = None) -> Episode:
        """The finished episode; with `failure` one that its environment broke off, as far as it came."""
        spec = self._started()
        if not self._over and failure is None:
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
            terminated=self._terminated and failure is None,
            truncated=not self._terminated or failure is not None,
            success=failure is None and self._success(spec),
            info={} if failure is not None else json_info(self.env, spec.episode_id, info),
            segment_starts=tuple(self._segment_starts),
            failure=failure,
        )

    def close(self) -> None:
        """Release the environment, where it has a `close`."""
        close_environment(self.env, "none" if self._spec is None else self._spec.episode_id)

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


@lru_cache(maxsize=16)
def _permutation(seed: int, split: str, epoch: int, size: int) -> np.ndarray:
    generator = np.random.Generator(np.random.PCG64(derive_seed(seed, split, "rows", epoch)))
    return generator.permutation(size)


def row_for(seed: int, split: str, n: int, size: int) -> int:
    """Dataset row of the n-th training episode: every epoch visits each of `size` rows once, reshuffled."""
    epoch, position = divmod(n, size)
    return int(_permutation(seed, split, epoch, size)[position])
