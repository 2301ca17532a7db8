"""What an iteration of a 7B model would take on 8, 64 and 512 GPUs, worked out: `python benchmarks/scale.py`.

Arithmetic, not a measurement: sizes follow from the model's shape and are those of the files that the stages write;
passes are those of docs/performance.md; speeds are data-sheet numbers times assumed efficiencies. docs/scale.md shows
the tables and says what is left out. Times in seconds, sizes in bytes.
"""

from dataclasses import dataclass

GB = 1e9


@dataclass(frozen=True)
class Model:
    """A decoder with full multi-head attention, in bfloat16, with LoRA on every linear layer."""

    layers: int = 32
    width: int = 4096
    mlp: int = 11008
    vocabulary: int = 32000
    rank: int = 16

    @property
    def matrix_weights(self) -> int:
        """Weights that a token is multiplied with: four attention matrices, three of the MLP, the output head."""
        layer = 4 * self.width**2 + 3 * self.width * self.mlp
        return self.layers * layer + self.vocabulary * self.width

    @property
    def base(self) -> int:
        """The base model's file: the embedding too, two bytes a weight."""
        return 2 * (self.matrix_weights + self.vocabulary * self.width)

    @property
    def adapter_weights(self) -> int:
        """`P`: rank x (inputs + outputs) of every adapted matrix."""
        return self.layers * self.rank * (4 * 2 * self.width + 3 * (self.width + self.mlp))

    @property
    def policy(self) -> int:
        """Three adapters in float32."""
        return 12 * self.adapter_weights

    @property
    def optimizer(self) -> int:
        """Two moments for each weight of actor and critic."""
        return 16 * self.adapter_weights

    @property
    def kept_token(self) -> int:
        """Keys and values of one token, two bytes each."""
        return 2 * 2 * self.layers * self.width


@dataclass(frozen=True)
class Work:
    """One iteration: every turn has an observation and a reply of the same length."""

    episodes: int = 1024
    turns: int = 4
    reply: int = 256
    micro_batch: int = 4  # rows of one pass
    passes: int = 7  # 5 forward, 2 backward: one optimizer step, KL, layers recomputed

    @property
    def sampled(self) -> int:
        """Tokens that an episode samples."""
        return self.turns * self.reply

    @property
    def row(self) -> int:
        """Tokens of a whole transcript."""
        return 2 * self.sampled


@dataclass(frozen=True)
class Machine:
    """GPUs with 80 GB, eight to a node, and a shared file system."""

    flops: float = 989e12 * 0.4  # bfloat16, the share that training reaches
    memory: float = 80 * GB * 0.9
    bandwidth: float = 3350 * GB * 0.6  # of GPU memory
    in_node: float = 450 * GB * 0.7  # one GPU to the others of its node
    reader: float = 2 * GB  # one client of the file system
    readers: float = 20 * GB  # all clients
    between_nodes: float = 50 * GB * 0.7  # one GPU to other nodes
    hashing: float = 1.8 * GB  # sha256 on one core, measured
    cluster_job: float = (
        25.0  # from a job's end to the next one's first tensor, in an empty SLURM queue, measured
    )
    local_job: float = 8.0  # the same on one machine, where a GPU stage starts cold


MODEL, WORK, MACHINE = Model(), Work(), Machine()


def sampling(servers: int, parallel: int = 1) -> float:
    """Time for all replies on `servers` GPUs, `parallel` of them holding a model together.

    A step reads the weights and the keys and values of all its sequences, at half of their final length. Prompts and
    observations are computed besides.
    """
    each = WORK.episodes * parallel / servers
    room = parallel * MACHINE.memory - MODEL.base
    at_once = min(each, room / (WORK.row * MODEL.kept_token))
    step = (MODEL.base + at_once * WORK.row / 2 * MODEL.kept_token) / (parallel * MACHINE.bandwidth)
    read = WORK.episodes * (WORK.row - WORK.sampled)
    return each / at_once * WORK.sampled * step + read * 2 * MODEL.matrix_weights / (servers * MACHINE.flops)


def learning(ranks: int, link: float = MACHINE.in_node) -> float:
    """Time for the passes of an update: the slower of computing and of gathering the base for every pass."""
    micro_batches = -(-WORK.episodes // (ranks * WORK.micro_batch))
    tokens = micro_batches * WORK.micro_batch * WORK.row
    computing = tokens * WORK.passes * 2 * MODEL.matrix_weights / MACHINE.flops
    gathering = micro_batches * WORK.passes * MODEL.base * (1 - 1 / ranks) / link
    return max(computing, gathering)


def handing_over() -> float:
    """Time to write and hash a policy with its optimizer state, and for the next update to read and hash it."""
    return 2 * (MODEL.policy + MODEL.optimizer) * (1 / MACHINE.reader + 1 / MACHINE.hashing)


def loading(jobs: int) -> float:
    """Time for `jobs` jobs at once to read the base model."""
    return MODEL.base / min(MACHINE.reader, MACHINE.readers / jobs)


@dataclass(frozen=True)
class Layout:
    """A chain's GPUs: those of vLLM, those of the update, and how long a job takes to start."""

    name: str
    servers: int
    ranks: int
    parallel: int = 1
    job: float = MACHINE.cluster_job

    @property
    def between(self) -> float:
        """The start of a rollout job and of an update, the base for the update, and the policy's way to the next."""
        return 2 * self.job + loading(1) + handing_over()

    @property
    def iteration(self) -> float:
        return sampling(self.servers, self.parallel) + learning(self.ranks) + self.between


ONE_NODE = Layout("one node, server asleep during updates", 8, 8, parallel=8, job=MACHINE.local_job)


def divided(gpus: int) -> Layout:
    """Servers that stay up, and the ranks of one node that make an iteration shortest."""
    choices = [
        Layout(f"{gpus - ranks} servers, {ranks} ranks", gpus - ranks, ranks)
        for ranks in (1, 2, 4, 8)
        if ranks < gpus
    ]
    return min(choices, key=lambda layout: layout.iteration)


def table() -> str:
    """Layouts of one chain as Markdown, and how many iterations an hour the same GPUs do as nodes with a chain each."""
    lines = [
        "| GPUs | one chain on them | sampling | update | between | iteration | iterations an hour | as nodes with a chain each |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for gpus, layout in ((8, ONE_NODE), (8, divided(8)), (64, divided(64)), (512, divided(512))):
        lines.append(
            f"| {gpus} | {layout.name} | {sampling(layout.servers, layout.parallel):.0f} s | {learning(layout.ranks):.0f} s "
            f"| {layout.between:.0f} s | {layout.iteration:.0f} s | {3600 / layout.iteration:.0f} "
            f"| {gpus / 8 * 3600 / ONE_NODE.iteration:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(
        f"base {MODEL.base / GB:.1f} GB, policy {MODEL.policy / GB:.2f} GB, optimizer state {MODEL.optimizer / GB:.2f} GB"
    )
    print(
        f"keys and values {MODEL.kept_token / 1e6:.2f} MB a token, {WORK.row * MODEL.kept_token / GB:.2f} GB an episode"
    )
    print(f"base for 1, 8, 64 jobs at once: {loading(1):.0f}, {loading(8):.0f}, {loading(64):.0f} s")
    print(
        f"a policy on its way: {handing_over():.1f} s; ranks of 8 nodes: {learning(64, MACHINE.between_nodes):.0f} s\n"
    )
    print(table())
