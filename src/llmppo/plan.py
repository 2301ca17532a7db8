"""The jobs of an experiment: hashes of shared artefacts, the files of each chain, and their order.

Snakemake's rules and the `llmppo` commands ask a `Plan` instead of reading the config. Nothing here
imports a model library.
"""

import json
import os
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

from llmppo.codetoken import code_token
from llmppo.config import (
    ExperimentConfig,
    GgufModelConfig,
    PretrainedModelConfig,
    StageResources,
    TinyModelConfig,
    WarmStartConfig,
)
from llmppo.errors import ConfigError
from llmppo.experiment import variant_config
from llmppo.files import MANIFEST, canonical_json, digest, files_of, fingerprint
from llmppo.grain import Block, partition, reached, record, recorded
from llmppo.layout import Layout, shards
from llmppo.ownership import near
from llmppo.stage_settings import STAGES, chain_config, resources_of, stage_settings

__all__ = ["Plan", "stage_settings"]

RESERVED_NAMES = ("shared", "mlartifacts", "mlflow.db")

User = TypeVar("User")


def _first_users(keys: dict[User, str]) -> dict[str, User]:
    """Invert user -> key; of several users the first one stands for all."""
    return {key: user for user, key in reversed(keys.items())}


class Plan:
    """The jobs of one experiment: what they read, what they write, in which order.

    With `whole_folders`, for results in an object store, rules declare folders with all that is in them.
    """

    def __init__(self, experiment: ExperimentConfig, whole_folders: bool = False) -> None:
        if experiment.name in RESERVED_NAMES:
            raise ConfigError(
                f"name: `{experiment.name}` is a folder of its own below `results`; choose another name"
            )
        self.experiment = experiment
        self.whole_folders = whole_folders
        self.layout = Layout(near(experiment.results), experiment.name)
        self.variants = {name: variant_config(experiment, name) for name in experiment.variants}
        self.replays = {name: config.replays for name, config in self.variants.items() if config.replays}
        self.sampled = [name for name in self.variants if name not in self.replays]
        self.chains = [(variant, seed) for variant in self.variants for seed in experiment.seeds]
        self.last = experiment.iterations
        if whole_folders:
            self._check_storable()
        self.code("rollout")  # a module of the user's that isn't Python is found here, before anything runs

    def _check_storable(self) -> None:
        if os.path.isabs(self.layout.results):
            raise ConfigError(
                "results: in an object store this is a folder below the storage prefix; give a relative path"
            )
        if any(config.stop_at for config in self.variants.values()):
            raise ConfigError(
                "stop_at: the policies of a stopped chain point to its last one, which their jobs don't get from an "
                "object store; leave it out there, or keep results on a file system that all machines share"
            )

    # Parameters of jobs.

    @cached_property
    def _stages(self) -> dict[tuple[str, str | None], tuple[dict[str, Any], str]]:
        """Settings and code token of each stage, for each variant and for the experiment as a whole."""
        configs: list[tuple[str | None, ExperimentConfig]] = [(None, self.experiment), *self.variants.items()]
        settings = {
            (stage, variant): stage_settings(config, stage) for variant, config in configs for stage in STAGES
        }
        return {key: (values, code_token(key[0], values)) for key, values in settings.items()}

    def settings(self, stage: str, variant: str | None = None) -> dict[str, Any]:
        """Settings of a stage; without a variant those of the whole experiment."""
        return self._stages[stage, variant][0]

    @cached_property
    def _settings_json(self) -> dict[tuple[str, str | None], str]:
        # The report shows variants in the order of the file; to the other stages order means nothing.
        return {
            key: json.dumps(settings) if key[0] == "report" else canonical_json(settings)
            for key, (settings, _) in self._stages.items()
        }

    def settings_json(self, stage: str, variant: str | None = None) -> str:
        return self._settings_json[stage, variant]

    def code(self, stage: str, variant: str | None = None) -> str:
        """Token of the code behind a stage, the user's own modules in its settings included."""
        return self._stages[stage, variant][1]

    def chain_file(self, variant: str, seed: int) -> str:
        """Settings of `variant_config`: an experiment config of its own, which reproduces this one chain.

        That of a replay has the variant that it replays too.
        """
        sampler = self.sampler(variant)
        variants = (
            {sampler: {}, variant: self.experiment.variants[variant]}
            if variant in self.replays
            else {variant: {}}
        )
        values = {**chain_config(self.variants[sampler]), "seeds": [seed], "variants": variants}
        return json.dumps({"config": values})  # keys in the order of the config models

    def sampler(self, variant: str) -> str:
        """The variant whose policy samples the rollouts of `variant`: its own, but for a replay."""
        return self.replays.get(variant, variant)

    def resources(self, stage: str) -> StageResources:
        """What a job of a stage asks for, all its ranks together."""
        one = resources_of(self.experiment, stage)
        ranks = self.experiment.ranks if stage in ("critic_warmup", "update") else 1
        return one.model_copy(update={"threads": one.threads * ranks})

    # Hashes of shared artefacts: everything they depend on, and nothing else.

    def _key(self, stage: str, variant: str, **parents: Any) -> str:
        return digest(
            {"settings": self.settings(stage, variant), "code": self.code(stage, variant), **parents}
        )

    def base_seed(self, variant: str, seed: int) -> int:
        """The seed that a base model is built with: the chain's own, or 0 where all chains share one."""
        model = self.variants[variant].base_model
        return seed if isinstance(model, TinyModelConfig) and model.per_seed else 0

    @cached_property
    def base_keys(self) -> dict[tuple[str, int], str]:
        """Key of each chain's base model."""
        return {
            (variant, seed): self._key("base_model", variant, seed=self.base_seed(variant, seed))
            for variant, seed in self.chains
        }

    @cached_property
    def dataset_keys(self) -> dict[str, str]:
        """Key of the dataset of each variant that has one."""
        return {
            variant: self._key("dataset", variant)
            for variant, config in self.variants.items()
            if config.dataset is not None
        }

    @cached_property
    def baselines_key(self) -> str:
        variant = self.reference_variant
        return self._key("baselines", variant, dataset=self.dataset_keys.get(variant))

    @cached_property
    def warmup_keys(self) -> dict[tuple[str, int], str]:
        """Key of each chain's warm-up rollouts; without the number of steps, so that more steps add to them."""
        return {
            (variant, seed): self._key(
                "rollout",
                self.sampler(variant),
                base=self.base_keys[variant, seed],
                dataset=self.dataset_keys.get(variant),
                seed=seed,
            )
            for variant, seed in self.chains
        }

    @cached_property
    def base_models(self) -> dict[str, tuple[str, int]]:
        """Key of each base model to the first chain that uses it."""
        return _first_users(self.base_keys)

    @cached_property
    def datasets(self) -> dict[str, str]:
        """Key of each dataset to the first variant that uses it."""
        return _first_users(self.dataset_keys)

    @cached_property
    def warmups(self) -> dict[str, tuple[str, int]]:
        """Key of each set of warm-up rollouts to the first chain that uses it."""
        return _first_users(self.warmup_keys)

    @property
    def reference_variant(self) -> str:
        """The variant whose environment gives the floors and bounds drawn in the report."""
        return next(iter(self.variants))

    @property
    def tracking_uri(self) -> str:
        return self.experiment.tracking.uri or f"sqlite:///{self.layout.mlflow_database}"

    @property
    def tracking_key(self) -> str:
        return digest(self.tracking_uri)

    # Inputs from outside the workflow: a change of these files reruns what is made of them.

    def base_model_sources(self, variant: str) -> list[str]:
        match self.variants[variant].base_model:
            case TinyModelConfig(warm_start=WarmStartConfig(kwargs=kwargs)):
                return [
                    value for value in kwargs.values() if isinstance(value, str) and Path(value).is_file()
                ]
            case GgufModelConfig(package=None, file=file):
                return [file]
            case PretrainedModelConfig(path=path) if Path(path).is_dir():
                return [str(file) for file in sorted(Path(path).iterdir()) if file.is_file()]
        return []

    def dataset_sources(self, variant: str) -> list[str]:
        dataset = self.variants[variant].dataset
        given = [] if dataset is None else [path for path in (dataset.train, dataset.eval) if path]
        return [str(file) for path in given for file in files_of(path)]

    @cached_property
    def _fingerprint(self) -> Callable[[tuple[str, ...]], str]:
        """`fingerprint`, which reads what several variants and seeds use once."""
        return cache(fingerprint)

    def base_model_content(self, variant: str) -> str:
        return self._fingerprint(tuple(self.base_model_sources(variant)))

    def dataset_content(self, variant: str) -> str:
        return self._fingerprint(tuple(self.dataset_sources(variant)))

    def maker(self, variant: str, seed: int) -> str:
        """Hash of all that a chain's numbers are made with: its config but for its length, code and data of the user's."""
        config = json.loads(self.chain_file(variant, seed))["config"] | {"iterations": None}
        codes = {
            code.partition("-")[2] for (_, of), (_, code) in self._stages.items() if of in (variant, None)
        }
        return digest(
            [config, sorted(codes), self.base_model_content(variant), self.dataset_content(variant)]
        )

    # Jobs of one or of several iterations.

    @cached_property
    def jobs(self) -> list[range]:
        """The iterations of each job, in order; all chains share the partition."""
        size, record = self.experiment.iterations_per_job, self.layout.jobs
        ends = recorded(record)
        if size == 1 and not ends:
            return partition(self.last, 1)
        stop = self.experiment.stop_at
        cut = self.experiment.evaluation.every if stop and stop.metric.startswith("eval/") else None
        done = reached(
            self.layout.of_chain(variant, seed) for variant, seed in self.chains if variant in self.sampled
        )
        return partition(self.last, size, ends=ends, reached=done, cut=cut)

    def record_jobs(self) -> None:
        """Let later runs find the partition, whatever `iterations_per_job` they have."""
        record(self.layout.jobs, self.jobs)

    @cached_property
    def blocks(self) -> list[Block]:
        """The jobs of several iterations."""
        variants: dict[range, list[str]] = {}
        for variant in self.sampled:
            variants.setdefault(self.shards(variant), []).append(variant)
        return [
            Block(iterations, shards, tuple(names))
            for iterations in self.jobs
            if len(iterations) > 1
            for shards, names in variants.items()
        ]

    @cached_property
    def single(self) -> str:
        """Pattern of the iterations whose rollouts and update are jobs of their own."""
        if not self.blocks:
            return r"(?!0000)\d\d\d\d+"
        return "|".join(f"{job[0]:04d}" for job in self.jobs if len(job) == 1) or "(?!)"

    # Artefacts of a chain, as files that Snakemake watches.

    def watched(self, folder: str) -> str:
        """What stands for a folder: its manifest, or the folder itself where jobs get only what is declared."""
        return folder if self.whole_folders else f"{folder}/{MANIFEST}"

    def base_manifest(self, variant: str, seed: int) -> str:
        return self.watched(self.layout.base_model(self.base_keys[variant, seed]))

    def dataset_manifest(self, variant: str) -> list[str]:
        key = self.dataset_keys.get(variant)
        return [] if key is None else [self.watched(self.layout.dataset(key))]

    def baselines_file(self) -> str:
        return self.layout.baselines(self.baselines_key)

    def policy_manifest(self, variant: str, seed: int, iteration: int) -> str:
        return self.watched(self.layout.policy(variant, seed, iteration))

    def shards(self, variant: str) -> range:
        config = self.variants[variant]
        return shards(config.ppo.batch_size, config.rollout.shard_size)

    def rollouts(self, variant: str, seed: int, iteration: int) -> list[str]:
        sampler = self.sampler(variant)
        return [self.layout.rollout(sampler, seed, iteration, shard) for shard in self.shards(sampler)]

    def warmup_rollouts(self, variant: str, seed: int) -> list[str]:
        key = self.warmup_keys[variant, seed]
        steps = range(1, self.variants[variant].ppo.critic_warmup_steps + 1)
        return [
            self.layout.warmup_rollout(key, step, shard) for step in steps for shard in self.shards(variant)
        ]

    def evaluated(self) -> list[int]:
        """Iterations whose policy is evaluated: the first, every k-th, the last."""
        every = self.experiment.evaluation.every
        return sorted({*range(0, self.last + 1, every), self.last})

    def evaluations(self, variant: str, seed: int) -> list[str]:
        return [self.layout.evaluation_metrics(variant, seed, i) for i in self.evaluated()]

    def stop_evaluation(self, variant: str, seed: int, iteration: int) -> list[str]:
        """The evaluation that may end the chain before update `iteration`, if there is one.

        Only every k-th counts: the one of a last iteration must not matter once the chain is extended.
        """
        stop = self.variants[variant].stop_at
        if stop is None or not stop.metric.startswith("eval/"):
            return []
        if (iteration - 1) % self.experiment.evaluation.every:
            return []
        return [self.layout.evaluation_metrics(variant, seed, iteration - 1)]

    def prunable(self, iteration: int) -> str:
        """What goes of policy `iteration - 2` once update `iteration` is done: nothing, "optimizer" or "weights".

        The policy before stays whole: should this update be cut off before Snakemake notes its end, it runs
        again. Policy 0 stays whole for edits that rerun the chain from its start. In an object store all do: a job
        has copies.
        """
        old = iteration - 2
        if old <= 0 or self.whole_folders:
            return ""
        kept = old % self.experiment.keep_every == 0 or old in self.evaluated()
        return "optimizer" if kept else "weights"

    def prune_option(self, iteration: int) -> str:
        """`prunable` as an argument of `llmppo update`."""
        what = self.prunable(iteration)
        return f"--prune {what}" if what else ""

    def prune_options(self, block: Block) -> str:
        """What a job of several iterations prunes, as arguments of `llmppo iterations`.

        Never the policy that it starts from, which it needs until Snakemake knows that it is done: that is left to
        the next job.
        """
        before = next((job for job in self.jobs if job[-1] == block.first - 1), range(1))
        policies = {before[0] - 1, *range(block.first - 2, block.last - 1)} - {block.first - 1}
        kinds = {policy: self.prunable(policy + 2) for policy in sorted(policies)}
        return " ".join(f"--prune {policy} {what}" for policy, what in kinds.items() if what)

    def updates(self, variant: str, seed: int) -> list[str]:
        return [self.layout.metrics(variant, seed, i) for i in range(1, self.last + 1)]

    def transcripts(self, variant: str, seed: int) -> list[str]:
        """Evaluation episodes of the first and the last policy."""
        return [
            f"{self.layout.evaluation(variant, seed, i)}/{decoding}.parquet"
            for i in (0, self.last)
            for decoding in self.experiment.evaluation.decoding
        ]

    def measured(self, variant: str, seed: int) -> list[str]:
        """Every metrics file of a chain."""
        return [
            self.layout.warmup_metrics(variant, seed),
            *self.updates(variant, seed),
            *self.evaluations(variant, seed),
        ]

    def summary(self) -> str:
        """One sentence on the size of the experiment."""
        variants, seeds = len(self.variants), len(self.experiment.seeds)
        return (
            f"{self.experiment.name}: {variants} variant{'s' * (variants > 1)} x {seeds} seed{'s' * (seeds > 1)}, "
            f"{self.last} iteration{'s' * (self.last > 1)} of {self.experiment.ppo.batch_size} episodes, results in {self.layout.root}"
        )

    def targets(self) -> Iterator[str]:
        """What a finished experiment has."""
        yield self.layout.report
        for variant, seed in self.chains:
            yield self.watched(self.layout.export(variant, seed))
            if self.experiment.tracking.mlflow:
                yield self.layout.tracked(variant, seed)
