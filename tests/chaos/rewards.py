"""Environments that hang or raise, rewards that are no rewards, a model that gives NaN."""

import json
import shutil
from functools import partial
from random import Random

import torch
from benches import Lane
from chaos_task import WRONG as MODES
from outcomes import LOST, WRONG, Outcome, kind
from safetensors.torch import load_file, save_file

from llmppo.files import read_json, write_manifest

PLAYING = ("rollout", "warmup_rollout", "evaluate")
COMPUTING = (*PLAYING, "update", "critic_warmup")
FAULTY = ("hangs", "raises", "exits")


def wrong_reward(modes: tuple[str, ...], lane: Lane, rng: Random, number: int) -> Outcome:
    """The reward goes wrong once, which a second try mends, or for good, which ends the stage."""
    bench, outcome = lane.bench, Outcome()
    stage = rng.choice([stage for stage in lane.repeatable if stage.rule in PLAYING])
    bench.without(stage)
    before = bench.others(stage)
    fault = {"mode": modes[number % len(modes)], "times": 1 if number // len(modes) % 2 else 10_000}
    (bench.folder / "fault.json").write_text(json.dumps(fault))
    ended = bench.do(stage)
    outcome.complain(LOST, bench.lost(before))
    outcome.complain(WRONG, [f"{fault}: {text}" for text in bench.altered()])
    if ended.status:
        outcome.told(ended.text, "episode", "env.max_failed_frac")
    (bench.folder / "fault.json").unlink()
    if ended.status:
        bench.do(stage)
    outcome.same([f"{fault}: {text}" for text in bench.differences()])
    return outcome


@kind("NaN from the model", cases=10, sample=3)
def nan_weights(lane: Lane, rng: Random, number: int) -> Outcome:
    """A base model whose manifest is right and whose numbers aren't."""
    bench, outcome = lane.bench, Outcome()
    stage = rng.choice([stage for stage in lane.repeatable if stage.rule in COMPUTING])
    bench.without(stage)
    (base,) = (bench.results / "shared" / "base_model").iterdir()
    sound = shutil.copytree(base, bench.folder / "sound")
    tensors = load_file(base / "model.safetensors")
    tensors[rng.choice(sorted(tensors))].fill_(rng.choice((torch.nan, torch.inf)))
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    write_manifest(
        base, **{name: fact for name, fact in read_json(base / "manifest.json").items() if name != "files"}
    )
    ended = bench.do(stage)
    if ended.status:
        outcome.told(ended.text, "NaN")
    else:
        outcome.complain(WRONG, [f"{stage.name} computes with NaN"])
    shutil.rmtree(base)
    sound.rename(base)
    bench.drop(stage)
    bench.do(stage)
    outcome.same(bench.differences())
    return outcome


kind("environment that hangs or raises", cases=12, sample=2)(partial(wrong_reward, FAULTY))
kind("reward that is none", cases=18, sample=4)(
    partial(wrong_reward, tuple(mode for mode in MODES if mode not in FAULTY))
)
