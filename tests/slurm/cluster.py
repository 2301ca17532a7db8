"""A SLURM of two nodes on this machine, for the length of a test: munged, slurmctld and a slurmd for each node.

Needs root and the programs of Debian's `slurm-wlm` and `munge`; no systemd, no cgroups, no accounting. Each node has
one GPU that SLURM counts and nobody uses. All files lie in one folder, but for links in /etc/slurm: SLURM's programs
look there when a job step has dropped SLURM_CONF, as Snakemake's does.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ETC = Path("/etc/slurm")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
NODES = ("one", "two")
CONTROLLER_PORT = 26817
# Munge's credentials last 10 s, not five minutes: a requeued job has to wait until its old one has expired.
CONFIG = """\
ClusterName=llmppo
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=2
KillWait=2
MinJobAge=3600
ReturnToService=0
GresTypes=gpu
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """What this machine lacks for a SLURM of its own; None where nothing."""
    if os.geteuid() != 0:
        return "starting a SLURM needs root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not found; on Debian: apt-get install slurm-wlm munge"
    if os.path.lexists(ETC / "slurm.conf"):
        return f"{ETC}/slurm.conf exists: this machine belongs to a cluster"
    return None


def wait_for(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(0.1)


@dataclass(frozen=True)
class Job:
    """A job in SLURM's queue; `comment` is what Snakemake's executor calls it, `rule_NAME_wildcards_...`."""

    id: str
    state: str
    node: str
    comment: str


class Cluster:
    """A running SLURM; `with Cluster(folder) as cluster:` stops it at the end, with all of its jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.links: list[Path] = []
        self.daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Cluster":
        self._configure()
        try:
            self._start("munged", "--foreground", "--force", *self._munge_options())
            socket = self.folder / "munge.socket"
            wait_for(socket.exists, "munge's socket")
            self._start("slurmctld", "-D")
            for node in NODES:
                self._start("slurmd", "-D", "-N", node)
            wait_for(lambda: self.states() == dict.fromkeys(NODES, "idle"), "idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(subprocess.CalledProcessError):
            for job in self.jobs():
                if job.state in ("PENDING", "RUNNING"):
                    self.command("scancel", job.id)
            wait_for(lambda: all(job.state != "COMPLETING" for job in self.jobs()), "end of jobs", 15)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for link in self.links:
            link.unlink()

    def _munge_options(self) -> list[str]:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        files = {
            "key-file": "key",
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        return [f"--{option}={self.folder}/munge.{suffix}" for option, suffix in files.items()]

    def _configure(self) -> None:
        self.folder.mkdir(parents=True)
        (self.folder / "state").mkdir()
        nodes = [
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={CONTROLLER_PORT + number}"
            " CPUs=4 RealMemory=16000 Gres=gpu:1 State=UNKNOWN"
            for number, node in enumerate(NODES, start=1)
        ]
        config = CONFIG.format(
            host=socket.gethostname(), port=CONTROLLER_PORT, folder=self.folder, nodes="\n".join(nodes)
        )
        files = {"slurm": config, "gres": "Name=gpu File=/dev/null\n", "cgroup": "CgroupAutomount=no\n"}
        ETC.mkdir(exist_ok=True)
        for name, text in files.items():
            file, link = self.folder / f"{name}.conf", ETC / f"{name}.conf"
            file.write_text(text)
            link.symlink_to(file)
            self.links.append(link)

    def _start(self, *command: str) -> None:
        log = self.folder / f"{command[0]}.out"
        with open(log, "ab") as output:
            self.daemons.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
            )

    @staticmethod
    def command(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    def states(self) -> dict[str, str]:
        """Name of each node to its state; empty while the controller doesn't answer."""
        try:
            lines = self.command("sinfo", "-h", "-N", "-o", "%N %t").splitlines()
        except subprocess.CalledProcessError:
            return {}
        return dict(line.split() for line in lines)

    def jobs(self) -> list[Job]:
        """All jobs since the start, the ended ones too."""
        lines = self.command("squeue", "-h", "--states=all", "-o", "%i|%T|%N|%k").splitlines()
        return [Job(*line.split("|")) for line in lines]

    def details(self, job: Job) -> str:
        return self.command("scontrol", "show", "job", job.id)

    def set_node(self, node: str, state: str) -> None:
        self.command("scontrol", "update", f"nodename={node}", f"state={state}", "reason=test")
