"""Two thousand damaged configs: each is valid, or refused in words that name the key or the file.

Values are damaged at every key of the JSON schema, and the text of the YAML at random places. The same cases in
every run.
"""

import copy
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from llmppo.cli import main
from llmppo.experiment import load_experiment
from llmppo.plan import Plan
from llmppo.stage_settings import STAGES
from llmppo.testing.deadlines import deadline

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = [
    REPOSITORY / "config" / "config.yaml",
    *sorted((REPOSITORY / "config" / "experiments").glob("*.yaml")),
]
DEADLINE_S = 5.0
FUZZ = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=1000,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
    report_multiple_bugs=False,
)


@cache
def schema_keys() -> tuple[tuple[str, ...], ...]:
    """Every key of the schema as a path, sections included."""
    schema = json.loads((REPOSITORY / "workflow" / "schemas" / "experiment.schema.json").read_text())

    def below(section: dict[str, Any], path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        for option in [section, *section.get("anyOf", []), *section.get("oneOf", [])]:
            if "$ref" in option:
                yield from below(schema["$defs"][option["$ref"].rpartition("/")[2]], path)
            for name, held in option.get("properties", {}).items():
                yield (*path, name)
                yield from below(held, (*path, name))

    return tuple(sorted(set(below(schema, ()))))


JUNK = st.one_of(
    st.sampled_from(
        [
            None, True, False, "", " ", "\0", "\u202e", "ﬀ", "🙂" * 50, "x" * 5000, "y" * 200_000, "../../x", "~nobody/x",
            "/", "/dev/zero", "/etc/shadow", ".", "..", "a:b", ":", "os:system", "builtins:eval", "llmppo.cli:main", "llmppo.nothing:x",
            "import:x", "${HOME}", "{variant}", "`x`", "'; ls #", "-n", "--help", "http://", "file:///etc/passwd", "sqlite:///x",
            float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 5e-324, -0.0,
            0, -1, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**18, 1_000_001,
            [], {}, [[]], [None], {"": 0}, {"a": {"b": {"c": [1, {"d": None}]}}}, {1: 2}, {None: None}, {2.5: 1},
            list(range(70)), {f"k{number}": number for number in range(500)},
        ]
    ),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=8),
    st.dates(),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
)  # fmt: skip
TAGS = [
    "!!python/object/apply:os.system ['touch RAN']", "!!python/name:os.system", "!!python/object:os.stat_result {}",
    "!!binary x", "!!binary aGVsbG8=", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]", "!!timestamp x", "!!int x",
    "!!float x", "!!bool x", "!!null x", "!!map []", "!!seq {}", "!unknown x", "2024-99-99", "2024-01-01", "1:99",
    "0x", "0b2", "1e", "{a: 1, a: 2}", "{[1]: 2}", "{{a: b}: c}", "*nowhere", "&a [*a]", "&a {a: *a}", "{<<: 3}", "{<<: {a: 1}}",
    "9" * 5000, "[" * 2000, "{a: " * 300 + "1" + "}" * 300, "|\n  text", "'", '"\\x"', '"\\ud800"', "%", "@x", "- a\n- b", "\t",
    "&a [x, x] \nb1: &b [*a, *a, *a, *a, *a, *a, *a, *a, *a]\nb2: &c [*b, *b, *b, *b, *b, *b, *b, *b]\n"
    "b3: &d [*c, *c, *c, *c, *c, *c, *c, *c]\nb4: &e [*d, *d, *d, *d, *d, *d, *d, *d]\nb5: &f [*e, *e, *e, *e, *e, *e, *e, *e]\n"
    "b6: &g [*f, *f, *f, *f, *f, *f, *f, *f]\nb7: &h [*g, *g, *g, *g, *g, *g, *g, *g]\ndescription: [*h, *h, *h, *h, *h, *h, *h, *h]",
]  # fmt: skip


@cache
def shipped(number: int) -> dict[str, Any]:
    return yaml.safe_load(SHIPPED[number].read_text())


def put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    values[path[-1]] = value


def check(content: bytes) -> str | None:
    """The words of the refusal of a config file; None where it is valid, and then its jobs can be planned."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file, deadline(DEADLINE_S):
        file.write(content)
        file.flush()
        result = CliRunner().invoke(main, ["validate", file.name])
        if result.exit_code == 0:
            assert f"{file.name} is valid" in result.output
            plan = Plan(load_experiment(file.name))
            texts = [
                plan.settings_json(stage, variant) for stage in STAGES for variant in (None, *plan.variants)
            ]
            texts += [plan.chain_file(variant, 0) for variant in plan.variants]
            assert all(len(text.encode()) < 2**17 for text in texts)  # they are arguments of commands
            assert [plan.measured(*chain) for chain in plan.chains[:1]]
            return None
        assert isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == 1
        assert "Traceback" not in result.output
        assert len(result.output) < 20_000
        said = result.output.removeprefix("llmppo validate: error: ")
        assert said != result.output
        return said.replace(file.name, "FILE")


def text_of(values: Any) -> bytes:
    return yaml.dump(values, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True).encode()


@FUZZ
@given(st.data())
def test_a_damaged_value_is_refused_by_its_key(data: st.DataObject) -> None:
    values = copy.deepcopy(shipped(data.draw(st.integers(0, len(SHIPPED) - 1))))
    paths = data.draw(st.lists(st.sampled_from(schema_keys()), min_size=1, max_size=2))
    for number, path in enumerate(paths):
        how = data.draw(st.sampled_from(["value", "value", "value", "misspelt", "gone", "in a variant"]))
        value = data.draw(JUNK)
        if how == "misspelt":
            path = (
                *path[:-1],
                data.draw(st.sampled_from([path[-1][:-1], f"{path[-1]}x", path[-1].upper(), f" {path[-1]}"])),
            )
        if how == "in a variant":
            path = ("variants", "odd", *path)
        paths[number] = path
        put(values, path, value)
        if how == "gone":
            section: Any = values
            for part in path[:-1]:
                section = section[part]
            del section[path[-1]]
    said = check(text_of(values))
    if said is not None:
        assert any(part in said.replace("FILE", "") for path in paths for part in path), said


@FUZZ
@given(st.data())
def test_a_damaged_text_is_refused_by_its_file_or_key(data: st.DataObject) -> None:
    content = SHIPPED[data.draw(st.integers(0, len(SHIPPED) - 1))].read_bytes()
    lines = content.decode().splitlines()
    where = data.draw(st.integers(0, len(lines) - 1))
    match data.draw(st.sampled_from(["tag", "tag", "bytes", "cut", "twice", "indent", "whole", "bit"])):
        case "tag":
            key = lines[where].partition(":")[0]
            lines[where] = f"{key}: {data.draw(st.sampled_from(TAGS))}"
            content = "\n".join(lines).encode()
        case "bytes":
            at = data.draw(st.integers(0, len(content)))
            content = content[:at] + data.draw(st.binary(max_size=12)) + content[at:]
        case "cut":
            content = content[: data.draw(st.integers(0, len(content)))]
        case "twice":
            content = "\n".join([*lines[: where + 1], *lines[where:]]).encode()
        case "indent":
            lines[where] = " " * data.draw(st.integers(1, 9)) + lines[where].lstrip()
            content = "\n".join(lines).encode()
        case "whole":
            content = data.draw(
                st.sampled_from(TAGS).map(str.encode)
                | st.binary(max_size=200)
                | st.just(b"")
                | JUNK.map(text_of)
            )
        case "bit":
            at = data.draw(st.integers(0, len(content) - 1))
            content = (
                content[:at] + bytes([content[at] ^ 1 << data.draw(st.integers(0, 7))]) + content[at + 1 :]
            )
    said = check(content)
    assert said is None or "FILE" in said or "." in said.partition(":")[0], said
    assert not Path("RAN").exists()


START = "name: s\nbase_model: {kind: tiny, warm_start: null}\n"
REFUSED = {
    "": "expected a mapping of config keys",
    "- a\n": "expected a mapping of config keys",
    "name: [\n": "not valid YAML",
    "name: !!python/object/apply:os.system ['touch RAN']\n": "not valid YAML",
    f"{START}env: &a {{kwargs: *a}}\n": "env.kwargs.kwargs",
    f"{START}env: {{kwargs: {{a: &a [*a]}}}}\n": "env.kwargs.a.0.0",
    f"{START}iterations: .nan\n": "iterations: nan is no number",
    f"{START}ppo: {{lr_acto: 1}}\n": "ppo.lr_acto: unknown key; did you mean `lr_actor`?",
}


@pytest.mark.parametrize("text", REFUSED)
def test_the_command_refuses_in_one_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    for command in (["validate", "odd.yaml"], ["run", "--results", "there", "--config", "odd.yaml", "-n"]):
        done = subprocess.run(
            [sys.executable, "-m", "llmppo.cli", *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"llmppo {command[0]}: error: odd.yaml")
        assert REFUSED[text] in done.stderr
        assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["odd.yaml"]


@pytest.mark.workflow
@pytest.mark.parametrize("text", list(REFUSED)[-3:])
def test_plain_snakemake_refuses_with_the_same_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "odd.yaml").write_text(text)
    command = [
        "-m",
        "snakemake",
        "--snakefile",
        str(REPOSITORY / "Snakefile"),
        "-n",
        "--configfile",
        "odd.yaml",
    ]
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert REFUSED[text] in done.stderr
    assert "odd.yaml" in done.stderr
    assert "Traceback" not in done.stderr
