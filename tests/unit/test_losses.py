"""Policy, KL and value losses: hand-worked values, exact expectations, and garbage in masked slots."""

import math

import pytest
import torch

from llmppo.ppo import losses

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]]).bool()
TURNS = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])
GARBAGE = [0.0, 1e9, -1e9, math.nan, math.inf, -math.inf]


def log(*values):
    return torch.tensor([[math.log(value) for value in values]])


def policy(
    ratios, advantages, *, turns=None, level="token", pooling="sum", low=0.2, high=0.2, dual=None, **rest
):
    """Loss of one row with the given probability ratios, as a mean over its units; and the gradient."""
    new = log(*ratios).requires_grad_(True)
    mask = torch.ones_like(new).bool()
    turns = torch.tensor([turns or [0] * len(ratios)])
    num_turns = int(turns.max()) + 1
    units = {"token": len(ratios), "turn": num_turns, "trajectory": 1}[level]
    terms = losses.policy_loss(
        new, torch.zeros_like(new), torch.tensor([advantages]), mask, turns, level=level, num_turns=num_turns,
        pooling=pooling, clip_low=low, clip_high=high, dual_clip=dual,
        weights=losses.unit_weights(mask, turns, level, num_turns, "token", units), **rest,
    )  # fmt: skip
    terms.loss.backward()
    return float(terms.loss.detach()), new.grad[0].tolist(), terms.metrics


# -- the clipped surrogate ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # gained enough already: clipped above
        (0.5, 2.0, -1.0, -1.0),  # not clipped from below: the loss pulls it back
        (0.5, -2.0, 1.6, 0.0),  # lost enough already: clipped below
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_clipped_surrogate(ratio, advantage, loss, gradient):
    ours, grad, _ = policy([ratio], [advantage])
    assert ours == pytest.approx(loss, rel=1e-6)
    assert grad[0] == pytest.approx(gradient, rel=1e-6)


def test_clip_range_can_differ_above_and_below():
    assert policy([1.5], [2.0], low=0.1, high=0.4)[0] == pytest.approx(-2.8)
    assert policy([0.5], [-2.0], low=0.1, high=0.4)[0] == pytest.approx(1.8)
    metrics = policy([1.3, 1.5, 0.85, 0.95], [1.0] * 4, low=0.1, high=0.4)[2]
    assert (int(metrics["clip_low"]), int(metrics["clip_high"]), int(metrics["units"])) == (1, 1, 4)


def test_dual_clip_bounds_the_loss_of_bad_actions_only():
    loss, grad, _ = policy([9.0], [-2.0], dual=3.0)
    assert (loss, grad) == (pytest.approx(6.0), [0.0])
    assert policy([1.5], [-2.0], dual=3.0)[0] == pytest.approx(3.0)  # below the bound
    assert policy([9.0], [2.0], dual=3.0)[0] == pytest.approx(-2.4)  # good actions keep the plain clip


def test_turn_ratio_is_the_product_or_the_geometric_mean():
    turns, advantages = [0, 0, 1], [1.0, 1.0, 1.0]
    product, _, metrics = policy([1.1, 1.05, 0.9], advantages, turns=turns, level="turn")
    assert product == pytest.approx(-(1.1 * 1.05 + 0.9) / 2)
    assert float(metrics["ratio_max"]) == pytest.approx(1.1 * 1.05)
    geometric = policy([1.1, 1.05, 0.9], advantages, turns=turns, level="turn", pooling="mean")[0]
    assert geometric == pytest.approx(-(math.sqrt(1.1 * 1.05) + 0.9) / 2)


def test_trajectory_ratio_is_the_geometric_mean_whatever_the_pooling():
    ratio = (1.1 * 1.05 * 0.9) ** (1 / 3)
    for pooling in ("sum", "mean"):
        loss = policy(
            [1.1, 1.05, 0.9], [1.0, 2.0, 6.0], turns=[0, 0, 1], level="trajectory", pooling=pooling
        )[0]
        assert loss == pytest.approx(-3.0 * ratio)  # the mean advantage of the unit


def test_log_ratios_are_clamped_before_exp():
    new = torch.tensor([[500.0, -500.0]]).requires_grad_(True)
    mask, turns = torch.ones(1, 2).bool(), torch.zeros(1, 2, dtype=torch.long)
    terms = losses.policy_loss(
        new, torch.zeros(1, 2), torch.tensor([[-1.0, -1.0]]), mask, turns, level="token", num_turns=1,
        pooling="sum", clip_low=0.2, clip_high=0.2, dual_clip=None, weights=torch.ones(1, 2),
    )  # fmt: skip
    terms.loss.backward()
    assert float(terms.loss.detach()) == pytest.approx(math.exp(20) + 0.8)
    assert torch.isfinite(new.grad).all()
    assert all(torch.isfinite(torch.as_tensor(value)).all() for value in terms.metrics.values())


def test_approximate_kl_is_exact_in_expectation():
    """Under the old policy, the mean of approx_kl is KL(old || new)."""
    old, new = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    mask, turns = torch.ones(1, 1).bool(), torch.zeros(1, 1, dtype=torch.long)
    total = 0.0
    for token in range(3):
        terms = losses.policy_loss(
            new[token].reshape(1, 1), old[token].reshape(1, 1), torch.zeros(1, 1), mask, turns, level="token",
            num_turns=1, pooling="sum", clip_low=0.2, clip_high=0.2, dual_clip=None, weights=torch.ones(1, 1),
        )  # fmt: skip
        total += float(old[token].exp() * terms.metrics["approx_kl"])
    exact = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=old), torch.distributions.Categorical(logits=new)
    )
    assert total == pytest.approx(float(exact), rel=1e-5)


# -- engine correction ----------------------------------------------------------------------------


def test_engine_weights():
    old = torch.tensor([[-1.0, -1.0, -1.0, -1.0, -1.0, math.nan]])
    sampling = torch.tensor([[-1.0, -1.5, -9.0, math.nan, -math.inf, math.nan]])
    mask = torch.tensor([[True] * 5 + [False]])
    ours = losses.engine_weights(old, sampling, mask, cap=2.0)
    assert ours[0].tolist() == pytest.approx([1.0, math.exp(0.5), 2.0, 1.0, 1.0, 1.0])
    below = losses.engine_weights(old[:, :1], torch.tensor([[0.0]]), mask[:, :1], cap=2.0)
    assert float(below) == pytest.approx(math.exp(-1.0))  # no lower bound


def test_engine_weights_carry_no_gradient():
    old = torch.tensor([[-1.0]]).requires_grad_(True)
    assert not losses.engine_weights(old, torch.tensor([[-1.2]]), torch.ones(1, 1).bool(), 2.0).requires_grad


def test_engine_weights_are_averaged_over_a_unit():
    weights = torch.tensor([[0.5, 1.5, 0.25]])
    loss = policy([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], turns=[0, 0, 1], level="turn", correction=weights)[0]
    assert loss == pytest.approx(-(1.0 + 0.25) / 2)


# -- KL -------------------------------------------------------------------------------------------


def test_k3_and_k1_are_exact_in_expectation():
    """Under the policy, both have mean KL(policy || reference)."""
    p, q = torch.tensor([0.6, 0.3, 0.1]).log(), torch.tensor([0.3, 0.3, 0.4]).log()
    exact = float((p.exp() * (p - q)).sum())
    mask = torch.ones(3, 1).bool()
    k3 = losses.kl_loss(p[:, None], q[:, None], mask, None, p.exp()[:, None]).loss
    k1 = (losses.reward_kl(p[:, None], q[:, None], mask) * p.exp()[:, None]).sum()
    assert float(k3) == pytest.approx(exact, rel=1e-5)
    assert float(k1) == pytest.approx(exact, rel=1e-5)


def test_kl_clamp_drops_loss_and_gradient_of_tokens_far_below_the_reference():
    """k3(d) = e^d - d - 1 passes 10 between d = 2.6 and 2.62; the other side is never clamped."""
    gaps = torch.tensor([[2.6, 2.7, -30.0, 0.0]])
    new = torch.zeros(1, 4).requires_grad_(True)
    terms = losses.kl_loss(new, gaps, torch.ones(1, 4).bool(), 10.0, torch.ones(1, 4))
    terms.loss.backward()
    kept = [math.exp(2.6) - 3.6, 0.0, math.exp(-20) + 19, 0.0]  # the gap is clamped to +-20
    assert float(terms.loss.detach()) == pytest.approx(sum(kept), rel=1e-5)
    assert new.grad[0].tolist() == pytest.approx([1 - math.exp(2.6), 0.0, 0.0, 0.0], rel=1e-5)
    assert int(terms.metrics["kl_clamped"]) == 1
    assert float(terms.metrics["ref_kl"]) == pytest.approx(sum(kept) + math.exp(2.7) - 3.7, rel=1e-5)
    free = losses.kl_loss(new, gaps, torch.ones(1, 4).bool(), None, torch.ones(1, 4))
    assert float(free.loss.detach()) == pytest.approx(float(terms.metrics["ref_kl"]))


# -- value loss -----------------------------------------------------------------------------------


def value(values, old, returns, clip, *, level="token", turns=None, reduction="initial_value"):
    new = torch.tensor([values]).requires_grad_(True)
    mask = torch.ones_like(new).bool()
    turns = torch.tensor([turns or [0] * len(values)])
    num_turns = int(turns.max()) + 1
    terms = losses.value_loss(
        new, torch.tensor([old]), torch.tensor([returns]), mask, turns, level=level, num_turns=num_turns,
        reduction=reduction, clip=clip, weights=losses.unit_weights(mask, turns, level, num_turns, "constant", 1.0),
    )  # fmt: skip
    terms.loss.backward()
    return float(terms.loss.detach()), new.grad[0].tolist(), int(terms.metrics["clipped"])


@pytest.mark.parametrize(
    ("new", "old", "target", "clip", "loss", "gradient", "clipped"),
    [
        (1.0, 0.0, 3.0, None, 2.0, -2.0, 0),
        (1.0, 0.9, 3.0, 0.2, 2.0, -2.0, 0),
        (1.0, 0.0, 3.0, 0.2, 0.5 * 2.8**2, 0.0, 1),  # moved further than allowed, towards the target
        (1.0, 0.0, 0.0, 0.2, 0.5, 1.0, 0),  # moved away from the target: the larger loss pulls back
    ],
)
def test_value_loss(new, old, target, clip, loss, gradient, clipped):
    ours, grad, share = value([new], [old], [target], clip)
    assert ours == pytest.approx(loss)
    assert grad[0] == pytest.approx(gradient)
    assert share == clipped


@pytest.mark.parametrize(
    ("reduction", "turn_values", "gradient"),
    [
        ("initial_value", (1.0, 4.0), [0.0, 0.0, 4.0]),
        ("final_value", (3.0, 4.0), [0.0, 2.0, 4.0]),
        ("mean", (2.0, 4.0), [0.5, 0.5, 4.0]),
    ],
)
def test_value_loss_on_turns(reduction, turn_values, gradient):
    """Returns 1 and 0, constant over their turns."""
    loss, grad, _ = value(
        [1.0, 3.0, 4.0], [0.0] * 3, [1.0, 1.0, 0.0], None, level="turn", turns=[0, 0, 1], reduction=reduction
    )
    assert loss == pytest.approx(0.5 * ((turn_values[0] - 1) ** 2 + turn_values[1] ** 2))
    assert grad == pytest.approx(gradient)


# -- normalisation --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "normalization", "total", "expected"),
    [
        ("token", "token", 4.0, [[0.25, 0.25, 0.25, 0.0], [0.25, 0.0, 0.0, 0.0]]),
        ("token", "sequence", 2.0, [[1 / 6, 1 / 6, 1 / 6, 0.0], [0.5, 0.0, 0.0, 0.0]]),
        ("token", "constant", 10.0, [[0.1, 0.1, 0.1, 0.0], [0.1, 0.0, 0.0, 0.0]]),
        ("turn", "token", 3.0, [[1 / 3, 1 / 3], [1 / 3, 0.0]]),
        ("turn", "sequence", 2.0, [[0.25, 0.25], [0.5, 0.0]]),
        ("trajectory", "sequence", 2.0, [[0.5], [0.5]]),
        ("trajectory", "token", 0.0, [[1.0], [1.0]]),  # nothing is divided by zero
    ],
)
def test_unit_weights(level, normalization, total, expected):
    ours = losses.unit_weights(MASK, TURNS, level, 2, normalization, total)
    torch.testing.assert_close(ours, torch.tensor(expected))


# -- garbage in masked slots ----------------------------------------------------------------------


def filled(values, garbage):
    return torch.where(MASK, values, torch.full_like(values, garbage)).requires_grad_(True)


def everything(garbage, level):
    """Every loss, gradient and metric of one batch whose masked slots hold `garbage`."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(MASK.shape, generator=generator) for _ in range(8)]
    new, old, advantages, sampling, reference, entropy, values, returns = [filled(x, garbage) for x in draws]
    turns = torch.where(MASK, TURNS, 0 if garbage == 0 else 10**9)
    units = losses.unit_weights(MASK, turns, level, 2, "sequence", 2.0)
    tokens = losses.unit_weights(MASK, turns, "token", 2, "token", 4.0)
    surrogate = losses.policy_loss(
        new, old.detach(), advantages.detach(), MASK, turns, level=level, num_turns=2, pooling="sum",
        clip_low=0.2, clip_high=0.3, dual_clip=3.0, weights=units,
        correction=losses.engine_weights(old, sampling.detach(), MASK, 2.0),
    )  # fmt: skip
    kl = losses.kl_loss(new, reference.detach(), MASK, 10.0, tokens)
    bonus = losses.entropy_sum(entropy, MASK, tokens)
    value_level = "token" if level == "token" else "turn"
    fit = losses.value_loss(
        values, old.detach(), returns.detach(), MASK, turns, level=value_level, num_turns=2, reduction="mean",
        clip=0.2, weights=losses.unit_weights(MASK, turns, value_level, 2, "token", 3.0),
    )  # fmt: skip
    (surrogate.loss + kl.loss + bonus + fit.loss).backward()
    results = {"pg": surrogate.loss, "kl": kl.loss, "entropy": bonus, "value": fit.loss}
    results |= {f"pg.{k}": v for k, v in surrogate.metrics.items()}
    results |= {f"kl.{k}": v for k, v in kl.metrics.items()} | {
        f"value.{k}": v for k, v in fit.metrics.items()
    }
    results |= {"d new": new.grad, "d entropy": entropy.grad, "d values": values.grad}
    results["penalty"] = losses.reward_kl(old, reference, MASK)
    results["fit"] = torch.tensor(losses.explained_variance(values.detach(), returns.detach(), MASK))
    results["correlation"] = torch.tensor(losses.correlation(values.detach(), returns.detach(), MASK))
    return results


@pytest.mark.parametrize("level", ["token", "turn", "trajectory"])
@pytest.mark.parametrize("garbage", GARBAGE[1:])
def test_masked_slots_change_nothing(garbage, level):
    clean, dirty = everything(0.0, level), everything(garbage, level)
    for name, expected in clean.items():
        assert torch.equal(expected, dirty[name]), name


@pytest.mark.parametrize("level", ["token", "turn", "trajectory"])
def test_masked_slots_and_empty_rows_count_nowhere(level):
    """A batch with padded columns and an empty row has the metrics of the same batch without them."""
    generator = torch.Generator().manual_seed(1)
    new, old, advantages = (torch.randn(2, 3, generator=generator) for _ in range(3))
    turns = torch.tensor([[0, 0, 1], [0, 1, 1]])
    found = []
    for rows, columns in ((0, 0), (1, 2)):
        padded = [torch.nn.functional.pad(x, (0, columns, 0, rows)) for x in (new, old, advantages, turns)]
        mask = torch.nn.functional.pad(torch.ones(2, 3).bool(), (0, columns, 0, rows))
        terms = losses.policy_loss(
            *padded[:3], mask, padded[3], level=level, num_turns=2, pooling="mean", clip_low=0.2, clip_high=0.2,
            dual_clip=None, weights=losses.unit_weights(mask, padded[3], level, 2, "sequence", 2.0),
        )  # fmt: skip
        found.append(terms.metrics | {"loss": terms.loss})
    for name, value in found[0].items():
        assert float(value) == pytest.approx(float(found[1][name]), rel=1e-6), name
    units = {"token": (new - old).exp().sum(), "trajectory": (new - old).mean(1).exp().sum()}
    if level in units:
        assert float(found[1]["ratio_sum"]) == pytest.approx(float(units[level]), rel=1e-5)


# -- fit of the critic ----------------------------------------------------------------------------


def test_explained_variance_and_correlation():
    mask = torch.ones(1, 3).bool()
    returns = torch.tensor([[1.0, 2.0, 3.0]])
    assert (
        losses.explained_variance(returns + 5, returns, mask) == 1.0
    )  # a constant offset explains all variance
    assert losses.explained_variance(torch.zeros(1, 3), returns, mask) == 0.0
    assert losses.explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert losses.explained_variance(torch.tensor([[1.0, 2.0, 2.0]]), returns, mask) == pytest.approx(
        1 - (2 / 9) / (2 / 3)
    )
    assert losses.correlation(2 * returns - 7, returns, mask) == pytest.approx(1.0)
    assert losses.correlation(-returns, returns, mask) == pytest.approx(-1.0)


def test_fit_is_undefined_without_variance():
    mask = torch.ones(1, 3).bool()
    constant, varied = torch.ones(1, 3), torch.tensor([[1.0, 2.0, 3.0]])
    assert losses.explained_variance(varied, constant, mask) is None
    assert losses.correlation(constant, varied, mask) is None
    assert losses.correlation(varied, constant, mask) is None
    one = torch.tensor([[True, False, False]])
    assert losses.explained_variance(varied, varied, one) is None
    assert losses.correlation(varied, varied, one) is None
