"""Where every artefact of a results folder lies, as plain strings.

`Layout` is the only place that spells these paths. An argument may be a Snakemake placeholder such as
`"{iteration}"`: it passes through, so that a rule's pattern and a concrete path come from the same line.
"""

import shlex
from dataclasses import dataclass

from llmppo.secrecy import redact

RUN_PAGE = "mlflow.html"  # in a chain's folder: leads to its run


def ui_command(tracking_uri: str) -> str:
    """The command that serves MLflow's UI on a store, in the folder that the run was started in."""
    return f"mlflow ui --backend-store-uri {shlex.quote(redact(tracking_uri))}"


def _number(value: int | str) -> str:
    """Iterations are zero-padded, so that names sort as numbers; placeholders pass through."""
    return f"{value:04d}" if isinstance(value, int) else value


def shards(batch_size: int, shard_size: int) -> range:
    """Numbers of the shards that a batch of episodes is sampled in."""
    return range(-(-batch_size // shard_size))


@dataclass(frozen=True)
class ChainLayout:
    """The paths of one chain's iterations below `root`."""

    root: str

    def policy(self, iteration: int | str) -> str:
        return f"{self.root}/policy/{_number(iteration)}"

    def policy_manifest(self, iteration: int | str) -> str:
        return f"{self.policy(iteration)}/manifest.json"

    def iteration(self, iteration: int | str) -> str:
        return f"{self.root}/iterations/{_number(iteration)}"

    def rollout(self, iteration: int | str, shard: int | str) -> str:
        return f"{self.iteration(iteration)}/rollouts/shard-{shard}.parquet"

    def advantages(self, iteration: int | str) -> str:
        return f"{self.iteration(iteration)}/advantages.parquet"

    def metrics(self, iteration: int | str) -> str:
        return f"{self.iteration(iteration)}/metrics.json"

    @property
    def unfinished(self) -> "ChainLayout":
        """Where a job of several iterations keeps what it has done until its last one is."""
        return ChainLayout(f"{self.root}/unfinished")


@dataclass(frozen=True)
class Layout:
    """The paths below `results` for one experiment; `key` is a hash of what a shared artefact depends on."""

    results: str
    experiment: str

    @property
    def root(self) -> str:
        """The experiment's own folder."""
        return f"{self.results}/{self.experiment}"

    @property
    def lock(self) -> str:
        return f"{self.results}/.run.lock"

    @property
    def mlflow_database(self) -> str:
        return f"{self.results}/mlflow.db"

    @property
    def makers(self) -> str:
        """What the chains were made with; no artefact of a job."""
        return f"{self.root}/.makers.json"

    @property
    def jobs(self) -> str:
        """Which iterations run as one job, once there are jobs of several."""
        return f"{self.root}/jobs.json"

    @property
    def report(self) -> str:
        return f"{self.root}/report/report.html"

    @property
    def summary_table(self) -> str:
        return f"{self.root}/report/summary.csv"

    @property
    def rollouts_page(self) -> str:
        return f"{self.root}/report/rollouts.html"

    @property
    def figure(self) -> str:
        """The learning curve; the report's other figures lie beside it."""
        return f"{self.root}/report/figures/learning_curve.png"

    def notebook(self, name: str) -> str:
        """A notebook run on the experiment."""
        return f"{self.root}/notebooks/{name}.ipynb"

    @property
    def worker_log(self) -> str:
        return f"{self.root}/logs/worker.log"

    @property
    def server_log(self) -> str:
        return f"{self.root}/logs/vllm-server.log"

    # Shared by every variant, seed and experiment that agrees on what they depend on.

    def base_model(self, key: str) -> str:
        return f"{self.results}/shared/base_model/{key}"

    def dataset(self, key: str) -> str:
        return f"{self.results}/shared/dataset/{key}"

    def baselines(self, key: str) -> str:
        return f"{self.results}/shared/baselines/{key}.json"

    def warmup_rollout(self, key: str, step: int | str, shard: int | str) -> str:
        return f"{self.results}/shared/warmup_rollouts/{key}/step-{step}/shard-{shard}.parquet"

    def mlflow_ready(self, key: str) -> str:
        """Marks a tracking store whose tables exist."""
        return f"{self.results}/shared/mlflow/{key}.json"

    def shared_log(self, stage: str, name: str) -> str:
        return f"{self.results}/shared/logs/{stage}/{name}.log"

    def shared_benchmark(self, stage: str, name: str) -> str:
        return f"{self.results}/shared/benchmarks/{stage}/{name}.tsv"

    # One chain: a variant with a seed.

    def chain(self, variant: str, seed: int | str) -> str:
        return f"{self.root}/{variant}/seed-{seed}"

    def config(self, variant: str, seed: int | str) -> str:
        return f"{self.chain(variant, seed)}/config.yaml"

    def of_chain(self, variant: str, seed: int | str) -> ChainLayout:
        return ChainLayout(self.chain(variant, seed))

    def policy(self, variant: str, seed: int | str, iteration: int | str) -> str:
        return self.of_chain(variant, seed).policy(iteration)

    def warmup_metrics(self, variant: str, seed: int | str) -> str:
        return f"{self.chain(variant, seed)}/warmup/metrics.json"

    def rollout(self, variant: str, seed: int | str, iteration: int | str, shard: int | str) -> str:
        return self.of_chain(variant, seed).rollout(iteration, shard)

    def advantages(self, variant: str, seed: int | str, iteration: int | str) -> str:
        return self.of_chain(variant, seed).advantages(iteration)

    def metrics(self, variant: str, seed: int | str, iteration: int | str) -> str:
        return self.of_chain(variant, seed).metrics(iteration)

    def evaluation(self, variant: str, seed: int | str, iteration: int | str) -> str:
        return f"{self.chain(variant, seed)}/evaluations/{_number(iteration)}"

    def evaluation_metrics(self, variant: str, seed: int | str, iteration: int | str) -> str:
        return f"{self.evaluation(variant, seed, iteration)}/metrics.json"

    def export(self, variant: str, seed: int | str) -> str:
        return f"{self.chain(variant, seed)}/export"

    def tracked(self, variant: str, seed: int | str) -> str:
        """Marks a chain whose metrics are mirrored to the tracker."""
        return f"{self.chain(variant, seed)}/tracking.json"

    def run_page(self, variant: str, seed: int | str) -> str:
        """Leads to the chain's run in the tracker."""
        return f"{self.chain(variant, seed)}/{RUN_PAGE}"

    def log(self, stage: str, variant: str, seed: int | str, name: str) -> str:
        return f"{self.chain(variant, seed)}/logs/{stage}/{name}.log"

    def benchmark(self, stage: str, variant: str, seed: int | str, name: str) -> str:
        return f"{self.chain(variant, seed)}/benchmarks/{stage}/{name}.tsv"
