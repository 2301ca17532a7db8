"""The report: numbers of its table, what it shows of unfinished and odd runs, and that it stands alone."""

import csv
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from llmppo.errors import ArtefactError, ConfigError
from llmppo.files import write_json
from llmppo.reporting import figures
from llmppo.reporting.checks import run_checks
from llmppo.reporting.results import Chain, Record, load_chain
from llmppo.reporting.summary import mean_series, settled, success_curve, summarize
from llmppo.reporting.theme import inline_svg, series_colour, series_dash
from llmppo.reporting.timing import read_benchmarks, stage_minutes, stage_times
from llmppo.reporting.transcripts import pick, printable, validity
from llmppo.stages import report
from llmppo.testing.results import compare_config, game_config, made_up_episode, write_results
from llmppo.trajectories.parquet import write_episodes

VOID = {"meta", "br", "link", "hr", "img"}


def small(**changes: Any) -> dict[str, Any]:
    """Two seeds, four iterations, 16 evaluation episodes."""
    evaluation = {"every": 2, "episodes": 16, "decoding": ["sampled", "greedy"]}
    return game_config(**{"seeds": [0, 1], "iterations": 4, "evaluation": evaluation, **changes})


def chain(
    seed: int, success: dict[int, float], stopped_at: int | None = None, **metrics: list[float]
) -> Chain:
    """A chain with these evaluated successes, and training metrics from iteration 1 on."""
    evaluations = [Record(i, None, {"eval/success_rate": s, "eval/n": 100.0}) for i, s in success.items()]
    length = max((len(values) for values in metrics.values()), default=0)
    updates = [
        Record(
            k + 1,
            None,
            {name.replace("__", "/"): values[k] for name, values in metrics.items() if k < len(values)},
        )
        for k in range(length)
    ]
    return Chain("main", seed, Path("nowhere"), tuple(updates), tuple(evaluations), stopped_at=stopped_at)


@pytest.fixture
def drawn() -> None:
    """Asked for by tests that look at figures; the others run without drawing any."""


@pytest.fixture(autouse=True)
def _without_drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def titled(name: str, title: str, caption: str, draw: Any, folder: Path, **_: Any) -> figures.FigureView:
        return figures.FigureView(name, title, caption, "<svg></svg>")

    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(figures, "publish", titled)


class Page(HTMLParser):
    """Text and attributes of a page; fails on tags that don't close."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.stack: list[str] = []
        self.feed(html)
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.stack:
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def make(root: Path, values: dict[str, Any], **kwargs: Any) -> tuple[Page, Path]:
    _, results, baselines = write_results(root, values, **kwargs)
    out = results / "report" / "report.html"
    report.run(values, results=results, baselines=baselines, out=out)
    return Page(out.read_text(encoding="utf-8")), results


# --- numbers


def test_a_curve_is_the_mean_over_the_same_seeds_at_every_point() -> None:
    chains = [chain(0, {0: 0.2, 2: 0.4, 4: 0.6}), chain(1, {0: 0.4, 4: 0.8})]
    assert mean_series(chains, "eval/success_rate") == {0: [0.2, 0.4], 4: [0.6, 0.8]}
    curve = success_curve(chains)
    assert {i: estimate.mean for i, estimate in curve.items()} == pytest.approx({0: 0.3, 4: 0.7})
    assert {estimate.kind for estimate in curve.values()} == {"seeds"}


def test_a_seed_far_behind_is_left_out_but_a_little_behind_is_waited_for() -> None:
    far = [chain(0, {0: 0.2, 20: 0.8}), chain(1, {0: 0.2, 20: 0.8}), chain(2, {0: 0.2})]
    assert set(settled(far, "eval/success_rate")) == {("main", 0), ("main", 1)}
    near = [chain(0, {0: 0.2, 10: 0.6, 15: 0.7}), chain(1, {0: 0.2, 10: 0.6}), chain(2, {0: 0.2, 10: 0.6})]
    assert len(settled(near, "eval/success_rate")) == 3


def test_a_stopped_chain_keeps_its_last_success_while_others_go_on() -> None:
    chains = [chain(0, {0: 0.2, 5: 0.9}, stopped_at=5), chain(1, {0: 0.3, 5: 0.5, 10: 0.7})]
    assert mean_series(chains, "eval/success_rate")[10] == [0.9, 0.7]


def test_one_seed_has_the_binomial_interval() -> None:
    (point,) = success_curve([chain(0, {0: 0.5})]).values()
    assert (point.kind, point.n) == ("episodes", 100)
    assert point.low == pytest.approx(0.4038, abs=1e-4)


def test_gain_is_paired_by_seed() -> None:
    (variant,) = summarize([chain(0, {0: 0.1, 4: 0.5}), chain(1, {0: 0.3, 4: 0.7})])
    assert variant.gain is not None
    assert variant.gain.mean == pytest.approx(0.4)
    assert variant.gain.low == pytest.approx(0.4)  # both rise by 0.4, however far apart they are


def test_checks_name_the_chain_and_the_number() -> None:
    calm = chain(0, {}, actor__clip_frac=[0.1, 0.2], critic__explained_variance=[-0.5, 0.1, 0.1, 0.2])
    wild = chain(1, {}, actor__clip_frac=[0.1, 0.41], critic__explained_variance=[0.1, 0.1, 0.1, -0.2])
    checks = {check.title: check for check in run_checks([calm, wild])}
    assert checks["Clip fraction"].warn
    assert "seed 1: at most 0.41" in checks["Clip fraction"].detail
    assert checks["Explained variance"].warn
    assert not {c.title: c for c in run_checks([calm])}["Explained variance"].warn
    assert "Entropy" not in checks


def test_failed_episodes_are_counted_and_warned_of() -> None:
    some = chain(0, {}, rollout__failed_episodes=[0.0, 2.0, 1.0])
    none = chain(0, {}, rollout__failed_episodes=[0.0, 0.0])
    (check,) = run_checks([some])
    assert (check.warn, check.detail) == (
        True,
        "3 episodes failed in their environment and are left out of everything",
    )
    assert [check.warn for check in run_checks([none])] == [False]


def test_entropy_warns_only_when_it_halves_fast() -> None:
    slow = chain(0, {}, actor__entropy=[1.0 - 0.06 * k for k in range(12)])
    fast = chain(0, {}, actor__entropy=[1.0, 1.0, 0.9, 0.45, 0.4])
    assert [check.warn for check in run_checks([slow])] == [False]
    assert [check.warn for check in run_checks([fast])] == [True]


def test_benchmarks_are_told_apart_by_their_path(tmp_path: Path) -> None:
    header = "s\th:m:s\tmax_rss\tcpu_time\n"
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "0001-00.tsv").write_text(f"{header}2.5\t0:00:02\tNA\t2.0\n")
    (tmp_path / "critic-warmup.tsv").write_text(f"{header}9\t0:00:09\t100\t8\n")
    (tmp_path / "update_0003.txt").write_text(f"{header}4\t0:00:04\t300\t-\n")
    (tmp_path / "notes.txt").write_text("nothing\n")
    assert dict(read_benchmarks(tmp_path)) == {
        "critic_warmup": {"s": 9.0, "max_rss": 100.0, "cpu_time": 8.0},
        "rollout": {"s": 2.5, "cpu_time": 2.0},
        "update": {"s": 4.0, "max_rss": 300.0},
    }


def test_cpu_time_and_memory_come_from_the_usage_files(tmp_path: Path) -> None:
    benchmark = tmp_path / "benchmarks" / "update" / "0001.tsv"
    benchmark.parent.mkdir(parents=True)
    benchmark.write_text("s\th:m:s\tmax_rss\tcpu_time\n4\t0:00:04\t20\t0.1\n")  # a worker's client
    usage = tmp_path / "logs" / "update" / "0001.json"
    usage.parent.mkdir(parents=True)
    usage.write_text('{"cpu_s": 3.5, "peak_memory_mb": 512.0}')
    (times,) = stage_times([], [tmp_path])
    assert (times.stage, times.job_seconds, times.cpu_seconds) == ("update", [4.0], [3.5])
    assert times.memory_mb == [512.0]


def test_time_is_that_of_whole_jobs_only_where_every_chain_kept_it(tmp_path: Path) -> None:
    def timed(seed: int, jobs: list[float]) -> Chain:
        folder = tmp_path / f"seed-{seed}"
        for number, seconds in enumerate(jobs):
            path = folder / "benchmarks" / "update" / f"{number:04d}.tsv"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"s\th:m:s\tmax_rss\n{seconds}\t0:00:00\t1\n")
        updates = (Record(1, None, {"time/update_s": 6.0}), Record(2, None, {"time/update_s": 12.0}))
        return Chain("main", seed, folder, updates)

    kept, other, lost = timed(0, [60.0, 120.0]), timed(1, [30.0, 90.0]), timed(2, [])
    assert stage_minutes({"main": [kept, other]}) == (True, {"main": {"update": 2.5}})
    assert stage_minutes({"main": [kept, lost]}) == (False, {"main": {"update": pytest.approx(0.3)}})
    assert stage_minutes({"main": []}) == (False, {})


# --- transcripts


def row(place: int, task: str, success: bool, iteration: int = 0, invalid: bool = False) -> dict[str, Any]:
    return {
        "episode_id": f"eval-{iteration:04d}-{place:05d}",
        "task_id": task,
        "observations": ["?"],
        "actions": ["!"],
        "turn_rewards": [float(success)],
        "stop_reasons": ["eos"],
        "invalid": [invalid],
        "return": float(success),
        "success": success,
        "terminated": True,
        "truncated": False,
    }


def test_pairs_are_the_same_tasks_with_different_outcomes_first() -> None:
    outcomes = [(True, True), (False, True), (False, True), (False, False), (False, True), (True, False)]
    before = [row(k, f"t{k}", first) for k, (first, _) in enumerate(outcomes)]
    after = [row(k, f"t{k}", second, iteration=8) for k, (_, second) in enumerate(outcomes)]
    pairs = pick(before, list(reversed(after)), 5)
    assert [pair.task_id for pair in pairs] == ["t1", "t3", "t2", "t5", "t0"]
    assert [(pair.before.success, pair.after.success) for pair in pairs] == [
        (False, True),
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    ]
    assert len(pick(before, after, 99)) == len(outcomes)
    assert pick(before, after[:0], 5) == []


def test_tasks_repeat_only_when_there_is_no_other() -> None:
    before = [row(0, "a", False), row(1, "a", False), row(2, "b", False)]
    after = [row(k, task, True) for k, task in enumerate("aab")]
    assert [pair.task_id for pair in pick(before, after, 3)] == ["a", "b", "a"]


def test_control_characters_are_made_visible() -> None:
    assert printable("a\x00b\x1b[0m\n\tc\x7f") == "a␀b␛[0m\n\tc␡"


def test_validity_counts_episodes_and_falls_back_to_metrics_for_single_turns(tmp_path: Path) -> None:
    metrics = {"eval/success_rate": 0.4, "eval/invalid_action_frac": 0.2}
    run = Chain("main", 0, tmp_path, (), (Record(0, None, metrics),))
    assert validity(run, "greedy", multi_turn=True) == {}
    single = validity(run, "greedy", multi_turn=False)[0]
    assert (single.share, single.valid_success) == pytest.approx((0.8, 0.5))
    outcomes = [(k < 3, k > 4) for k in range(6)]
    episodes = [
        made_up_episode(k, [("?", "!", 0.0, invalid)], task="t", success=success)
        for k, (success, invalid) in enumerate(outcomes)
    ]
    write_episodes(run.evaluation_file(0, "greedy"), episodes, {})
    counted = validity(run, "greedy", multi_turn=True)[0]
    assert (counted.share, counted.valid_success, counted.other_success) == pytest.approx((5 / 6, 0.6, 0.0))
    assert counted.success == pytest.approx(0.5)


# --- the page


@pytest.mark.usefixtures("drawn")
def test_the_page_stands_alone_and_shows_its_parts(tmp_path: Path) -> None:
    page, results = make(tmp_path, small())
    for tag, name, value in page.attributes:
        assert tag not in {"script", "link", "iframe", "object", "img"}
        if name in {"src", "href", "xlink:href"} and not value.startswith("#"):
            assert tag == "a"
            assert (results / "report" / value.partition("#")[0]).exists(), value
    html = (results / "report" / "report.html").read_text(encoding="utf-8")
    assert "@import" not in html
    assert "url(http" not in html
    assert str(tmp_path) not in html
    for words in (
        "random play 0.24",
        "optimal play 1.00",
        "15 instances",
        "over 2 seeds",
        "Student's t",
        "Entropy",
    ):
        assert words in page.words
    links = {value for _, name, value in page.attributes if name == "href"}
    assert {
        "../main/seed-1/export",
        "../main/seed-1/evaluations/0004/sampled.parquet",
        "summary.csv",
    } <= links
    assert page.words.count("before, policy 0") == page.words.count("after, policy 4") == 5
    figures = results / "report" / "figures"
    for name in (
        "learning_curve",
        "learning_curve_tokens",
        "learning_curve_time",
        "reward_by_turn",
        "reward",
        "explained_variance",
        "value_loss",
        "ref_kl",
        "entropy",
        "time",
        "format",
    ):
        assert (figures / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (figures / f"{name}.svg").read_text(encoding="utf-8")


def test_the_table_has_the_numbers_of_the_metrics_files(tmp_path: Path) -> None:
    _, results = make(tmp_path, small())
    with open(results / "report" / "summary.csv", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    assert [(entry["variant"], entry["seed"], entry["iterations"]) for entry in rows] == [
        ("main", "0", "4"),
        ("main", "1", "4"),
    ]
    for entry in rows:
        folder = results / "main" / f"seed-{entry['seed']}" / "evaluations"
        first, last = (
            json.loads((folder / i / "metrics.json").read_text())["metrics"] for i in ("0000", "0004")
        )
        assert float(entry["success_start"]) == first["eval/success_rate"]
        assert float(entry["success_end"]) == last["eval/success_rate"]
        assert float(entry["greedy_end"]) == last["eval/greedy/success_rate"]
        assert float(entry["gain"]) == last["eval/success_rate"] - first["eval/success_rate"]
        assert entry["episodes"] == str(4 * 256)


@pytest.mark.usefixtures("drawn")
def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    _, results = make(tmp_path, small(seeds=[0], iterations=2))
    files = sorted(path for path in (results / "report").rglob("*") if path.is_file())
    before = [path.read_bytes() for path in files]
    make(tmp_path, small(seeds=[0], iterations=2))
    assert [path.read_bytes() for path in files] == before


@pytest.mark.usefixtures("drawn")
def test_several_variants_are_told_apart(tmp_path: Path) -> None:
    values = small(
        iterations=2,
        seeds=[0],
        variants={"turn": {}, "half": {"ppo": {"batch_size": 128}}},
        report={"transcripts": 1},
    )
    page, results = make(tmp_path, values)
    assert "1 seed of 2 variants" in page.words
    assert (
        results / "report" / "figures" / "learning_curve_episodes.svg"
    ).is_file()  # 256 and 128 an iteration
    assert {"var(--series-0)", "var(--series-1)"} <= set(
        re.findall(r"var\(--series-\d\)", str(page.attributes))
    )


@pytest.mark.usefixtures("drawn")
def test_variants_with_equal_curves_both_show(tmp_path: Path) -> None:
    """In the files and on the page; by colour alone the last one drawn would hide the others."""
    values = small(iterations=2, seeds=[0], variants={"a": {}, "b": {"ppo": {"clip_coef": 0.1}}})
    _, results = make(tmp_path, values)
    folder = results / "report"
    for text in (
        (folder / "figures" / "learning_curve.svg").read_text(),
        (folder / "report.html").read_text(),
    ):
        assert re.search(r"stroke-dasharray: 11,4.4", text)
    assert 'stroke-dasharray="10 4"' in (folder / "report.html").read_text()
    styles = [(series_colour(place), series_dash(place)) for place in range(24)]
    assert all(styles.count(style) == 1 for style in styles)
    assert all(one[1] != other[1] for one, other in pairwise(styles))


def test_one_seed_says_what_its_interval_is(tmp_path: Path) -> None:
    page, _ = make(tmp_path, compare_config(iterations=2))
    assert "over 96 episodes of one seed" in page.words
    assert "nothing about other seeds" in page.words
    assert "valid random pick gives 0.50" in page.words
    assert "through the share of valid answers" in page.words


def test_a_policy_without_one_valid_answer_has_no_success_among_them(tmp_path: Path) -> None:
    values = compare_config(iterations=2)
    _, results, baselines = write_results(tmp_path, values)
    wrong = [made_up_episode(k, [("?", "!", 0.0, True)], task="t", success=False) for k in range(3)]
    for iteration in ("0000", "0002"):
        folder = results / "main" / "seed-0" / "evaluations" / iteration
        write_episodes(folder / "greedy.parquet", wrong, {})
    out = results / "report" / "report.html"
    report.run(values, results=results, baselines=baselines, out=out)
    assert "success among them from – to –" in Page(out.read_text(encoding="utf-8")).words


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        ({("main", 0): -1, ("main", 1): -1}, "No evaluation yet."),
        ({("main", 0): 3, ("main", 1): -1}, "Seed 1 has not begun."),
        ({("main", 0): 0, ("main", 1): 0}, "Transcripts appear once a chain has been evaluated twice."),
        (
            {("main", 0): 4, ("main", 1): 1},
            "Seed 1 has reached iteration 1 of 4 and is left out of the means.",
        ),
    ],
)
def test_unfinished_runs_are_reported_as_far_as_they_are(
    tmp_path: Path, reached: dict[tuple[str, int], int], expected: str
) -> None:
    page, _ = make(tmp_path, small(), reached=reached)
    assert expected in page.words


def test_an_early_stop_is_no_unfinished_run(tmp_path: Path) -> None:
    page, results = make(tmp_path, small(), stopped={("main", 0): 2})
    assert "has reached iteration" not in page.words
    assert "2 (stopped)" in page.words
    assert load_chain(results / "main" / "seed-0", "main", 0).stopped_at == 2


def test_absent_null_and_non_finite_metrics_are_left_out(tmp_path: Path) -> None:
    values = small(seeds=[0])
    _, results, baselines = write_results(tmp_path, values)
    for path in (results / "main" / "seed-0").rglob("metrics.json"):
        content = json.loads(path.read_text())
        kept = {"rollout/reward_mean": float("nan"), "actor/entropy": None, "eval/success_rate": float("inf")}
        content["metrics"] = {"actor/ref_kl": 0.25, **kept}
        path.write_text(json.dumps(content))
    out = results / "report" / "report.html"
    report.run(values, results=results, baselines=baselines, out=out)
    page = Page(out.read_text(encoding="utf-8"))
    assert "No evaluation yet." in page.words
    assert "KL to the reference" in page.words
    assert "Entropy" not in page.words
    assert not re.search(r"\b(nan|inf|None)\b", page.words)


@pytest.mark.usefixtures("drawn")
def test_text_of_a_run_cannot_break_the_page(tmp_path: Path) -> None:
    values = small(seeds=[0], description="<script>alert(1)</script> & $x_2$")
    _, results, baselines = write_results(tmp_path, values)
    write_json(baselines, {"references": {"<b>$cheap_play$": 0.5}, "measured": {}, "notes": ["a < b"]})
    evil = made_up_episode(0, [("?", "</div><script>", 0.0, False)], task="<i>", success=False)
    for iteration in ("0000", "0004"):
        write_episodes(
            results / "main" / "seed-0" / "evaluations" / iteration / "sampled.parquet", [evil], {}
        )
    out = results / "report" / "report.html"
    report.run(values, results=results, baselines=baselines, out=out)
    page = Page(out.read_text(encoding="utf-8"))
    assert "</div><script>" in page.words
    assert "<script>alert(1)</script> & $x_2$" in page.words
    assert "<b>$cheap_play$ 0.50" in page.words


def test_damage_and_wrong_settings_are_named(tmp_path: Path) -> None:
    values = small(seeds=[0])
    _, results, baselines = write_results(tmp_path, values)
    out = results / "report" / "report.html"
    with pytest.raises(ConfigError, match="iteratons"):
        report.run({**values, "iteratons": 3}, results=results, baselines=baselines, out=out)
    broken = results / "main" / "seed-0" / "iterations" / "0002" / "metrics.json"
    broken.write_text("{")
    with pytest.raises(ArtefactError, match=r"0002/metrics.json"):
        report.run(values, results=results, baselines=baselines, out=out)
    assert not out.exists()


def test_a_report_needs_no_baselines(tmp_path: Path) -> None:
    values = small(seeds=[0])
    _, results, _ = write_results(tmp_path, values)
    out = results / "report" / "report.html"
    assert report.run(values, results=results, baselines=None, out=out).startswith(
        f"report: {out} (success 0."
    )


def test_figures_follow_the_page_scheme() -> None:
    svg = (
        '<?xml version="1.0"?><svg height="1pt" viewBox="0 0 2 2" width="1pt"><defs><style>*{}</style></defs>'
    )
    svg += '<g id="a"><path id="b" style="fill: #2b6797"/><use xlink:href="#b"/></g></svg>'
    inline = inline_svg(svg, "A curve")
    assert inline.startswith('<svg viewBox="0 0 2 2" role="img" aria-label="A curve">')
    assert "fill: var(--series-0)" in inline
    assert 'id="b"' in inline
    assert 'id="a"' not in inline
    assert "<style" not in inline


def test_a_measured_player_is_a_line_unless_its_exact_rate_is_known(tmp_path: Path) -> None:
    path = tmp_path / "baselines.json"
    measured = {
        name: {"success_rate": rate, "reward_mean": rate, "episodes": 10}
        for name, rate in (("random play", 0.3), ("best constant reply", 0.1))
    }
    write_json(path, {"references": {"random play": 0.25}, "measured": measured, "notes": []})
    found = report.read_baselines(path)
    assert list(found.references.items()) == [("best constant reply", 0.1), ("random play", 0.25)]
    assert found.measured["random play"]["success_rate"] == 0.3


def test_parts_of_the_reward_are_averaged_over_seeds(tmp_path: Path) -> None:
    values = small()
    _, results, baselines = write_results(tmp_path, values)
    out = results / "report" / "report.html"
    report.run(values, results=results, baselines=baselines, out=out)
    assert "Parts of the reward" not in out.read_text(encoding="utf-8")
    for seed, after in ((0, 0.5), (1, 1.0)):
        for iteration, value in (("0000", 0.125), ("0002", 0.3), ("0004", after)):
            path = results / "main" / f"seed-{seed}" / "evaluations" / iteration / "metrics.json"
            content = json.loads(path.read_text())
            content["metrics"]["eval/rewards/short & sweet"] = value
            write_json(path, content)
    report.run(values, results=results, baselines=baselines, out=out)
    words = Page(out.read_text(encoding="utf-8")).words
    assert re.search(r"Parts of the reward.*short & sweet\s+0\.12\s+0\.75", words, re.DOTALL)
