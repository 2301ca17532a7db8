"""One learn call: advantages of a whole batch, then optimizer steps over mini-batches.

Order of passes. With a single optimizer step the critic's gradient pass gives the values from which
its own rows' returns follow, then the whole batch's advantages are known, and the actor's pass comes
last with `old = new.detach()`. With several steps, one pass without gradient first gives old
log-probs, values and reference log-probs. The reference runs only when `beta > 0`.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from llmppo.config import PPOConfig
from llmppo.errors import MemoryShortError, NonFiniteError
from llmppo.models.adapted import AdaptedModel
from llmppo.models.threads import helpful_threads
from llmppo.ppo import losses
from llmppo.ppo.advantages import Advantages, token_advantages, token_rewards, turn_advantages, whiten
from llmppo.ppo.units import Level, pool, unit_mask, zero_masked
from llmppo.seeding import derive_seed
from llmppo.trainer.batch import UpdateBatch
from llmppo.trainer.memory import PassPlan, is_out_of_memory, ways_out
from llmppo.trainer.metrics import Sums, learn_metrics
from llmppo.trainer.offload import OffloadActivations
from llmppo.trainer.optimizer import ROLES, RoleOptimizer
from llmppo.trainer.passes import Passes, RoleOutput, RolePass
from llmppo.trainer.ranks import Ranks
from llmppo.trainer.returns import RunningReturns


@dataclass
class TokenColumns:
    """Per action token [B, N] results of an update, for the Parquet sibling of the rollouts."""

    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None


@dataclass
class Outcome:
    """What a learn call reports. `columns` rows are those of `batch`."""

    metrics: dict[str, float | None]
    batch: UpdateBatch
    columns: TokenColumns
    optimizer_steps: int = 0


@dataclass
class Update:
    """State of one learn call over `batch`; `run` carries it out."""

    model: AdaptedModel
    optimizer: RoleOptimizer
    passes: Passes
    batch: UpdateBatch
    config: PPOConfig
    plan: PassPlan
    max_turns: int
    seed: int
    learn_step: int
    warmup: bool
    running_returns: RunningReturns
    constant_units: float
    columns: TokenColumns = field(default_factory=TokenColumns)
    sums: Sums = field(default_factory=Sums)  # of this rank's micro-batches
    applied: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # by optimizer steps
    clock: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        device = self.model.device
        self.mask, self.turns = self.batch.mask.to(device), self.batch.turns.to(device)
        self.rewards = self.batch.rewards.to(device)
        self.num_turns = self.rewards.shape[1]
        self.granularity = self.config.granularity(self.max_turns)
        self.level: Level = self.config.ratio_level(self.max_turns)
        self.value_level: Level = self.granularity
        self.bootstrapping = self.config.truncation == "bootstrap" and bool(self.batch.truncated.any())
        self.with_reference = self.config.beta > 0 and not self.warmup
        self.gae: Advantages | None = None
        self.bootstrap: Tensor | None = None
        self.steps = 0

    @property
    def ranks(self) -> Ranks:
        return self.passes.ranks

    # -- shape of the update ------------------------------------------------------------------

    @property
    def epochs(self) -> int:
        if self.warmup and self.config.critic_warmup_epochs is not None:
            return self.config.critic_warmup_epochs
        return self.config.update_epochs

    @property
    def mini_size(self) -> int:
        return self.config.mini_batch_size or max(self.config.batch_size, len(self.batch))

    @property
    def single_step(self) -> bool:
        return self.epochs == 1 and len(self.batch) <= self.mini_size

    def mini_batches(self, epoch: int) -> list[list[int]]:
        """The rows of each optimizer step, reshuffled every epoch from the trainer's seed and step."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "shuffle", self.learn_step, epoch))
        order = torch.randperm(len(self.batch), generator=generator).tolist()
        return [order[start : start + self.mini_size] for start in range(0, len(order), self.mini_size)]

    # -- the learn call -----------------------------------------------------------------------

    def run(self) -> Outcome:
        """Carry the learn call out. Raises NonFiniteError and MemoryShortError."""
        try:
            with helpful_threads(self.model.base):
                return self._run()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            plan = replace(self.plan, fused=self.plan.fused and not self.single_step)
            ways = "; ".join(ways_out(self.config, plan, self.model.device))
            raise MemoryShortError(
                f"learn step {self.learn_step} ran out of memory on {self.model.device}. Set under `ppo`, the smallest change first: {ways}"
            ) from error

    def _run(self) -> Outcome:
        self.optimizer.zero_grad()
        self._require_finite_rows(self.rewards, "rewards")
        with self._timed("prepare"):
            self.passes.prepare()
        reward_kl = self.with_reference and self.config.kl_placement == "reward"
        whole_batch_first = not self.single_step or reward_kl or self.config.normalize_returns
        if whole_batch_first or self.model.critic == "head":
            self._collect(old_logprobs=not self.warmup and (not self.single_step or reward_kl))
            self._set_advantages()
            self._all_epochs()
        else:
            self._single_step()
        return Outcome(learn_metrics(self), self.batch, self.columns, self.steps)

    def explained_variance(self) -> float | None:
        """Explained variance of the critic's values on this batch, without learning from it."""
        with helpful_threads(self.model.base):
            self.passes.prepare()
            self._collect(old_logprobs=False)
        gae = self.estimate()
        return losses.explained_variance(gae.unit_values, gae.unit_returns, gae.unit_mask)

    def _collect(self, old_logprobs: bool) -> None:
        """One pass without gradient for everything the mini-batches need."""
        head = self.model.critic == "head"
        roles: list[RolePass] = []
        if old_logprobs:
            roles.append(self.passes.actor)
        if not head or not old_logprobs:
            roles.append(self.passes.critic)
        if self.with_reference:
            roles.append(RolePass(self.model.reference_route, score=True))
        with self._timed("no_grad_forward"):
            outputs = self.passes.sweep(roles, self.bootstrapping)
        for role, output in zip(roles, outputs, strict=True):
            if role.score and role.adapter == "actor":
                self.columns.old_logprobs = output.logprobs
            elif role.score:
                self.columns.ref_logprobs = output.logprobs
            if role.value:
                self.columns.values = self.running_returns.restore(output.values)
                self.bootstrap = self.running_returns.restore(output.bootstrap)

    def _single_step(self) -> None:
        """Critic first: its gradient pass gives the values, then the actor's pass (not in a warm-up), then one step."""
        count, width = self.mask.shape
        self.columns.values = torch.zeros(count, width, device=self.mask.device)
        self.bootstrap = torch.zeros(count, device=self.mask.device) if self.bootstrapping else None
        (rows,) = self.mini_batches(0)
        totals = self._totals(rows)
        for micro in self._dealt(rows, [self.passes.critic]):
            self._critic_micro(micro, totals, first=True)
        self.ranks.sum(self.columns.values, self.bootstrap)
        self._set_advantages()
        if not self.warmup:
            self._actor_last(rows, totals)
        self._optimizer_step(rows)

    def _actor_last(self, rows: Sequence[int], totals: dict[str, float]) -> None:
        """The actor's gradient pass of a single step, where old and new log-probs are the same."""
        if self.with_reference:
            with self._timed("no_grad_forward"):
                (output,) = self.passes.sweep([RolePass(self.model.reference_route, score=True)])
            self.columns.ref_logprobs = output.logprobs
        self.columns.old_logprobs = torch.zeros(self.mask.shape, device=self.mask.device)
        for micro in self._dealt(rows, [self.passes.actor]):
            self._actor_micro(micro, totals, old_is_new=True)
        self.ranks.sum(self.columns.old_logprobs)

    def _all_epochs(self) -> None:
        old_is_new = self.columns.old_logprobs is None and not self.warmup
        if old_is_new:
            self.columns.old_logprobs = torch.zeros_like(self.mask, dtype=torch.float32)
        watched = self.config.target_kl is not None and not self.warmup
        for epoch in range(self.epochs):
            before = self._moved() if watched else None
            for rows in self.mini_batches(epoch):
                totals = self._totals(rows)
                for micro in self._dealt(rows, *self._passes_of_a_step()):
                    if self.warmup:
                        self._critic_micro(micro, totals)
                    elif self._fused:
                        self._fused_micro(micro, totals, old_is_new)
                    else:
                        self._actor_micro(micro, totals, old_is_new)
                        self._critic_micro(micro, totals)
                self._optimizer_step(rows)
            if self.config.target_kl is not None and before is not None:
                moved, seen = (self._moved() - before).tolist()
                if moved / max(seen, 1.0) > self.config.target_kl:
                    break
        if old_is_new:
            self.ranks.sum(self.columns.old_logprobs)

    @property
    def _fused(self) -> bool:
        return self.model.critic == "head" or self.plan.fused

    def _passes_of_a_step(self) -> list[list[RolePass]]:
        """The roles of each gradient pass of a micro-batch."""
        if self.warmup:
            return [[self.passes.critic]]
        if self.model.critic == "head":
            return [[self.passes.actor]]
        return (
            [[self.passes.actor, self.passes.critic]]
            if self._fused
            else [[self.passes.actor], [self.passes.critic]]
        )

    def _dealt(self, rows: Sequence[int], *passes: list[RolePass]) -> Iterator[list[int]]:
        """This rank's micro-batches of `rows`. Where others still have one, the `passes` of one of theirs run for nothing."""
        for micro, counts in self.ranks.deal(self.passes.micro_batches(rows)):
            if counts:
                yield micro
                continue
            for roles in passes:
                with self.model.router.using(self.passes.route(micro, roles)):
                    found = [
                        tensor.sum()
                        for output in self.passes.run(micro, roles)
                        for tensor in (output.logprobs, output.values)
                        if tensor is not None
                    ]
                    (0.0 * torch.stack(found).sum()).backward()

    def _moved(self) -> Tensor:
        """Sums of KL to the old policy and of tokens, so far and over all ranks."""
        sums = torch.tensor(
            [self.sums.totals.get(f"actor/{name}", 0.0) for name in ("approx_kl", "tokens")],
            dtype=torch.float64, device=self.mask.device,
        )  # fmt: skip
        self.ranks.sum(sums)
        return sums

    # -- advantages ---------------------------------------------------------------------------

    def estimate(self, rows: Sequence[int] | None = None) -> Advantages:
        """Advantages and returns (in reward units) of some rows, or of all."""
        pick = slice(None) if rows is None else torch.as_tensor(rows, device=self.mask.device)
        mask, turns, rewards = self.mask[pick], self.turns[pick], self.rewards[pick]
        assert self.columns.values is not None
        values = self.columns.values[pick]
        after = torch.zeros(len(mask), device=mask.device)
        if self.bootstrap is not None:
            after = zero_masked(self.bootstrap[pick], self.batch.truncated.to(mask.device)[pick])
        lam = 1.0 if self.warmup else self.config.gae_lambda
        critic_lam = (
            lam if self.warmup or self.config.critic_gae_lambda is None else self.config.critic_gae_lambda
        )
        penalty = None
        if self.with_reference and self.config.kl_placement == "reward":
            assert self.columns.old_logprobs is not None and self.columns.ref_logprobs is not None
            penalty = -self.config.beta * losses.reward_kl(
                self.columns.old_logprobs[pick], self.columns.ref_logprobs[pick], mask
            )
        if self.granularity == "turn":
            if penalty is not None:
                rewards = rewards + pool(penalty, mask, turns, "turn", self.num_turns, "sum")
            return turn_advantages(
                values, mask, turns, rewards,
                gamma=self.config.gamma, lam=lam, critic_lam=critic_lam,
                reduction=self.config.turn_value_reduction, bootstrap=after,
            )  # fmt: skip
        per_token = token_rewards(rewards, mask, turns)
        return token_advantages(
            values, mask, turns, per_token if penalty is None else per_token + penalty,
            gamma=self.config.gamma, token_gamma=self.config.token_gamma, lam=lam, critic_lam=critic_lam,
            length_adaptive_alpha=None if self.warmup else self.config.length_adaptive_lambda, bootstrap=after,
        )  # fmt: skip

    def _set_advantages(self) -> None:
        self.gae = self.estimate()
        # Whitening would spread one bad episode over all, and return statistics would keep it.
        self._require_finite_rows(self.gae.unit_advantages + self.gae.unit_returns, "advantages")
        if self.config.normalize_returns:
            self.running_returns.update(self.gae.unit_returns[self.gae.unit_mask], self.model.value_head)
        advantages = self.gae.advantages
        if self.config.whiten_advantages and not self.warmup:
            if self.granularity == "turn":
                whitened = whiten(self.gae.unit_advantages, self.gae.unit_mask)
                advantages = zero_masked(whitened.gather(1, zero_masked(self.turns, self.mask)), self.mask)
            else:
                advantages = whiten(self.gae.unit_advantages, self.gae.unit_mask)
        self.columns.advantages = advantages
        self.columns.returns = self.gae.returns

    # -- micro-batches ------------------------------------------------------------------------

    def _totals(self, rows: Sequence[int]) -> dict[str, float]:
        """Normalisers of a mini-batch, known before its first micro-batch."""
        mask, turns = self.mask[rows], self.turns[rows]
        if self.config.loss_normalization == "sequence":
            return dict.fromkeys(("policy", "value", "token"), float(mask.any(dim=1).sum()))
        if self.config.loss_normalization == "constant":
            return dict.fromkeys(("policy", "value", "token"), self.constant_units * len(rows))
        return {
            "policy": float(unit_mask(mask, turns, self.level, self.num_turns).sum()),
            "value": float(unit_mask(mask, turns, self.value_level, self.num_turns).sum()),
            "token": float(mask.sum()),
        }

    def _weights(self, level: Level, mask: Tensor, turns: Tensor, total: float) -> Tensor:
        return losses.unit_weights(mask, turns, level, self.num_turns, self.config.loss_normalization, total)

    def _cut(self, values: Tensor, micro: Sequence[int], width: int) -> Tensor:
        return values[torch.as_tensor(micro, device=values.device), :width]

    def _policy_terms(
        self, micro: Sequence[int], output: RoleOutput, totals: dict[str, float], old_is_new: bool
    ) -> Tensor:
        assert output.logprobs is not None
        assert self.columns.old_logprobs is not None and self.columns.advantages is not None
        new, width = output.logprobs, output.logprobs.shape[1]
        mask, turns = self._cut(self.mask, micro, width), self._cut(self.turns, micro, width)
        if old_is_new:
            self.columns.old_logprobs[torch.as_tensor(micro), :width] = new.detach()
        old = self._cut(self.columns.old_logprobs, micro, width)
        correction = None
        if self.batch.sampling_logprobs is not None:
            sampling = self._cut(self.batch.sampling_logprobs.to(mask.device), micro, width)
            if self.config.vllm_importance_sampling_correction:
                correction = losses.engine_weights(
                    old, sampling, mask, self.config.vllm_importance_sampling_cap
                )
        surrogate = losses.policy_loss(
            new, old, self._cut(self.columns.advantages, micro, width), mask, turns,
            level=self.level, num_turns=self.num_turns, pooling=self.config.turn_ratio_pooling,
            clip_low=self.config.clip_coef, clip_high=self.config.clip_coef_high or self.config.clip_coef,
            dual_clip=self.config.dual_clip,
            weights=self._weights(self.level, mask, turns, totals["policy"]), correction=correction,
        )  # fmt: skip
        self.sums.add("actor/", surrogate.metrics)
        self.sums.add("actor/", {"pg_loss": surrogate.loss.detach()})
        if output.entropies is not None:
            self.sums.add("actor/", {"entropy": zero_masked(output.entropies.detach(), mask).sum()})
        loss = surrogate.loss
        token_weights = self._weights("token", mask, turns, totals["token"])
        if self.with_reference:
            assert self.columns.ref_logprobs is not None
            reference = self._cut(self.columns.ref_logprobs, micro, width)
            kl = losses.kl_loss(new, reference, mask, self.config.kl_clamp, token_weights)
            self.sums.add("actor/", kl.metrics)
            if self.config.kl_placement == "loss":
                loss = loss + self.config.beta * kl.loss
        if self.config.ent_coef:
            assert output.entropies is not None
            loss = loss - self.config.ent_coef * losses.entropy_sum(output.entropies, mask, token_weights)
        self.sums.add("actor/", {"loss": loss.detach()})
        self._require_finite(loss, new, micro, "actor")
        return loss

    def _value_terms(
        self, micro: Sequence[int], output: RoleOutput, totals: dict[str, float], first: bool
    ) -> Tensor:
        assert output.values is not None and self.columns.values is not None
        values, width = output.values, output.values.shape[1]
        rows = torch.as_tensor(micro, device=values.device)
        mask, turns = self._cut(self.mask, micro, width), self._cut(self.turns, micro, width)
        if first:
            self.columns.values[rows, :width] = values.detach()
            if self.bootstrap is not None and output.bootstrap is not None:
                self.bootstrap[rows] = output.bootstrap
            returns = self.estimate(micro).returns[:, :width]
        else:
            assert self.gae is not None
            returns = self._cut(self.gae.returns, micro, width)
        terms = losses.value_loss(
            values, self.running_returns.normalise(self._cut(self.columns.values, micro, width)),
            self.running_returns.normalise(returns), mask, turns,
            level=self.value_level, num_turns=self.num_turns, reduction=self.config.turn_value_reduction,
            clip=None if self.warmup else self.config.value_clip,  # a first fit needs no trust region
            weights=self._weights(self.value_level, mask, turns, totals["value"]),
        )  # fmt: skip
        self.sums.add("critic/", terms.metrics)
        self.sums.add("critic/", {"loss": terms.loss.detach()})
        loss = self.config.vf_coef * terms.loss
        self._require_finite(loss, values, micro, "critic")
        return loss

    def _critic_micro(self, micro: Sequence[int], totals: dict[str, float], first: bool = False) -> None:
        roles = [self.passes.critic]
        with self._timed("forward_backward"), self.model.router.using(self.passes.route(micro, roles)):
            with self._offloading():
                (output,) = self.passes.run(micro, roles, self.bootstrapping and first)
            self._value_terms(micro, output, totals, first).backward()

    def _actor_micro(self, micro: Sequence[int], totals: dict[str, float], old_is_new: bool) -> None:
        roles = [self.passes.actor]
        with self._timed("forward_backward"), self.model.router.using(self.passes.route(micro, roles)):
            with self._offloading():
                (output,) = self.passes.run(micro, roles)
            self._policy_terms(micro, output, totals, old_is_new).backward()

    def _fused_micro(self, micro: Sequence[int], totals: dict[str, float], old_is_new: bool) -> None:
        head = self.model.critic == "head"
        roles = [self.passes.actor] if head else [self.passes.actor, self.passes.critic]
        with self._timed("forward_backward"), self.model.router.using(self.passes.route(micro, roles)):
            with self._offloading():
                outputs = self.passes.run(micro, roles)
            policy = self._policy_terms(micro, outputs[0], totals, old_is_new)
            (policy + self._value_terms(micro, outputs[-1], totals, first=False)).backward()

    def _offloading(self) -> AbstractContextManager[Any]:
        """Of a gradient pass, where its activations wait for the backward pass."""
        return (
            OffloadActivations(self.model.peft.parameters())
            if self.config.activation_offload
            else nullcontext()
        )

    def _require_finite(self, loss: Tensor, outputs: Tensor, micro: Sequence[int], role: str) -> None:
        if bool(torch.isfinite(loss)):
            return
        bad = [
            self.batch.episode_ids[row]
            for row, good in zip(micro, torch.isfinite(outputs).all(dim=1).tolist(), strict=True)
            if not good
        ]
        named = bad or [self.batch.episode_ids[row] for row in micro]
        raise NonFiniteError(
            f"the {role} loss is {float(loss.detach())} in learn step {self.learn_step}; episodes: {_listed(named)}. "
            "Look at their rewards and log-probs; a lower learning rate or kl_clamp often helps"
        )

    def _require_finite_rows(self, values: Tensor, what: str) -> None:
        """`values` [B, ...] hold a number for every episode."""
        finite = torch.isfinite(values).all(dim=1).tolist()
        bad = [name for name, good in zip(self.batch.episode_ids, finite, strict=True) if not good]
        if bad:
            raise NonFiniteError(
                f"the {what} aren't finite in learn step {self.learn_step}; episodes: {_listed(bad)}. "
                "Look at the rewards that the environment gave, and at the critic's values"
            )

    def _optimizer_step(self, rows: Sequence[int]) -> None:
        with self._timed("optimizer"):
            self.ranks.sum_gradients(
                parameter for role in ROLES for parameter in self.optimizer.parameters[role]
            )
            rates = self.optimizer.set_learning_rates(self.config, self.learn_step)
            norms = self.optimizer.clip(self.config)
            for role in ROLES:
                before, after = norms[role]
                if not torch.isfinite(torch.tensor(before)):
                    raise NonFiniteError(
                        f"the {role} gradient norm is {before} in learn step {self.learn_step}; "
                        f"episodes: {_listed([self.batch.episode_ids[row] for row in rows])}"
                    )
                self.applied[f"{role}/grad_norm"] += before
                self.applied[f"{role}/grad_norm_clipped"] += after
                self.applied[f"{role}/lr"] = rates[role]
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.steps += 1

    # -- small helpers -------------------------------------------------------------------------

    def _timed(self, phase: str) -> "_Timer":
        return _Timer(self.clock, phase)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")


class _Timer:
    """Adds the seconds of a block to a clock; phases don't nest."""

    def __init__(self, clock: dict[str, float], phase: str) -> None:
        self.clock, self.phase = clock, phase

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.clock[self.phase] += time.perf_counter() - self.start
