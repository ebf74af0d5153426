"""Optimizers by name against torch's, and the schedules against their closed forms."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import nn

from fsdp_qlora.choices import OPTIMIZERS
from fsdp_qlora.optim import build_optimizer, build_scheduler, lr_share

PEAK = 0.5


def rates(name: str, total: int, **settings) -> list[float]:
    """The learning rate of every step of a run, as the optimizer used it."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], PEAK)
    scheduler = build_scheduler(optimizer, name, total, **settings)
    used = []
    for _ in range(total):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


def test_constant_is_the_peak_at_every_step():
    assert rates("constant", 7) == [PEAK] * 7


def test_linear_rises_over_the_warm_up_then_falls_to_zero():
    """40 steps, a quarter of them warm-up: 1/11 ... 10/11 of the peak, then 30/30 ... 1/30."""
    expected = [(i + 1) / 11 for i in range(10)] + [i / 30 for i in range(30, 0, -1)]
    assert rates("linear", 40, warmup_share=0.25) == pytest.approx([PEAK * e for e in expected])


def test_cosine_falls_by_half_a_cosine_to_a_tenth():
    """60 steps, 10% warm-up: 54 steps of cosine, whose thirds are known by heart."""
    used = rates("cosine", 60)
    assert used[:6] == pytest.approx([PEAK * (i + 1) / 7 for i in range(6)])
    shares = {6: 1.0, 6 + 18: 0.1 + 0.9 * 0.75, 6 + 27: 0.55, 6 + 36: 0.1 + 0.9 * 0.25}
    for step, share in shares.items():
        assert used[step] == pytest.approx(PEAK * share)
    assert used[-1] == pytest.approx(PEAK * (0.1 + 0.45 * (1 + math.cos(math.pi * 53 / 54))))


@pytest.mark.parametrize("name, floor", [("linear", 0.0), ("cosine", 0.1)])
def test_a_schedule_stays_at_its_floor_after_the_last_step(name, floor):
    for step in (100, 101, 1000):
        assert lr_share(step, name, 100) == pytest.approx(floor)


@pytest.mark.parametrize("name", ["linear", "cosine"])
@pytest.mark.parametrize(
    "total, warmup_share", [(1, 0.1), (2, 0.5), (3, 0.9), (10, 0.0), (97, 0.1)]
)
def test_no_step_is_wasted_at_rate_zero_and_the_peak_is_reached(name, total, warmup_share):
    used = rates(name, total, warmup_share=warmup_share)
    assert min(used) > 0 and max(used) == PEAK
    assert used.index(PEAK) == int(total * warmup_share)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_a_warm_up_in_steps_rises_for_as_many_steps_in_every_schedule(name):
    used = rates(name, 40, warmup_steps=4)
    assert used[:5] == pytest.approx([PEAK * share for share in (0.2, 0.4, 0.6, 0.8, 1)])
    assert used[5] <= PEAK and (name == "constant") == (used[-1] == PEAK)


def trained(build, shape=(64, 65)):
    """Weights after some steps of a small model whose first layer is frozen, and the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, shape[0]), nn.Linear(*shape), nn.Linear(shape[1], 2))
    model[0].requires_grad_(False)
    optimizer = build(model)
    for step in range(3):
        rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        model(rows).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), optimizer


def torchs_adamw(parameters):
    return torch.optim.AdamW(parameters, 0.01, weight_decay=0.2)


REFERENCES = {  # and how far states of fewer bits may lead from it in three steps of 0.01
    "adamw": (torchs_adamw, 1e-6),
    "adamw_bf16": (torchs_adamw, 1e-3),
    "adamw_8bit": (torchs_adamw, 1e-2),
    "adafactor": (lambda p: torch.optim.Adafactor(p, 0.01), 1e-6),
    "adam": (lambda p: torch.optim.Adam(p, 0.01), 1e-6),
    "sgd": (lambda p: torch.optim.SGD(p, 0.01), 0),
    "adadelta": (lambda p: torch.optim.Adadelta(p, 0.01), 0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_name_steps_as_torchs_optimizer_and_leaves_frozen_weights(name):
    reference, tolerance = REFERENCES[name]
    ours, optimizer = trained(lambda m: build_optimizer(m, name, 0.01, 0.2))
    theirs, _ = trained(lambda m: reference([p for p in m.parameters() if p.requires_grad]))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert len(optimizer.param_groups[0]["params"]) == 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_there_before_the_first_step_and_nothing_else_has_changed(name):
    def sizes(optimizer):
        return {p: {k: (v.shape, v.dtype) for k, v in optimizer.state[p].items()} for p in weights}

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 2)).bfloat16()
    before, weights = {k: v.clone() for k, v in model.state_dict().items()}, [*model.parameters()]
    optimizer = build_optimizer(model, name, 0.01, 0.2)
    made = sizes(optimizer)
    assert all(made.values()) == (name != "sgd")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in weights) and optimizer.param_groups[0]["lr"] == 0.01
    assert not any(v.any() for state in optimizer.state.values() for v in state.values())
    model(torch.ones(4, 64).bfloat16()).square().sum().backward()
    optimizer.step()
    assert sizes(optimizer) == made


def test_an_unknown_optimizer_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=f"--optimizer lion: choose {', '.join(OPTIMIZERS)}"):
        build_optimizer(nn.Linear(2, 2), "lion")


def test_an_unknown_schedule_is_refused_with_the_choices():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], PEAK)
    with pytest.raises(ValueError, match="--lr_scheduler wsd: choose constant, linear or cosine"):
        build_scheduler(optimizer, "wsd", 10)


def test_loraplus_steps_are_those_of_pefts_optimizer():
    """B and DoRA's magnitudes learn at 16 times the rate of A."""

    def model():
        torch.manual_seed(0)
        config = LoraConfig(r=2, use_dora=True, target_modules=["0"])
        return get_peft_model(nn.Sequential(nn.Linear(8, 6)), config)

    ours, theirs = model(), model()
    steps = {
        ours: build_optimizer(ours, "adamw", 1e-2, 0.0, loraplus_lr_ratio=16),
        theirs: create_loraplus_optimizer(theirs, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=16),
    }
    for each, optimizer in steps.items():
        for _ in range(3):
            each(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(steps[ours].param_groups) == 2
    torch.testing.assert_close(dict(ours.named_parameters()), dict(theirs.named_parameters()))
