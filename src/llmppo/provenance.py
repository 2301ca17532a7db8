"""Where numbers come from: code version, library versions and lock file, without a trace of the machine."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from llmppo import __version__
from llmppo.files import sha256_file

LIBRARIES = ("torch", "transformers", "peft", "numpy", "pyarrow", "snakemake")
LOCK = "requirements.lock"


def _checkout() -> Path | None:
    """The repository that this package is imported from, or None for an installed one."""
    root = Path(__file__).resolve().parents[2]
    return root if (root / "pyproject.toml").is_file() and (root / ".git").exists() else None


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def code_version() -> str:
    """The git commit of the checkout ("-dirty" with uncommitted source changes), else the package version."""
    root = _checkout()
    commit = _git(root, "rev-parse", "HEAD") if root else None
    if root is None or not commit:
        return __version__
    return f"{commit}-dirty" if _git(root, "status", "--porcelain", "--", "src", "workflow") else commit


def lock_hash() -> str | None:
    """sha256 of the lock file of the checkout or of the working directory; None where there is none."""
    for folder in (_checkout(), Path.cwd()):
        if folder is not None and (folder / LOCK).is_file():
            return sha256_file(folder / LOCK)
    return None


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that numbers depend on."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def provenance() -> dict[str, str]:
    """Everything together, as text."""
    return {
        "llmppo": __version__,
        "code": code_version(),
        "lock (sha256)": lock_hash() or "no lock file found",
        **library_versions(),
    }
