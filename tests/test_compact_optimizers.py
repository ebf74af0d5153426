"""AdamW with 8-bit and bfloat16 states, and stochastic rounding."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from fsdp_qlora.optim import CompactAdamW
from fsdp_qlora.optim.adamw import _adamw_update, _update_factors
from fsdp_qlora.optim.base import int32
from fsdp_qlora.optim.rounding import _to_bf16, element_bits

GROUP = dict(lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)


def bits(count: int, salt: int = 1, first: int = 0) -> torch.Tensor:
    return element_bits(count, torch.tensor([first, int32(salt)], dtype=torch.int32))


@pytest.mark.parametrize("between", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("low", [1.0, -3.0, 2.0**-20])
def test_rounding_goes_up_with_the_chance_of_what_is_cut_off(low, between):
    """Of n coins with chance p, the share that falls up is p within 4 sqrt(p (1 - p) / n)."""
    gap, n = abs(low) * 2**-7 / (1.5 if low == -3.0 else 1), 2**16  # -3 is 1.5 x 2
    x = torch.full((n,), low + between * gap)
    rounded = _to_bf16(x, bits(n)).double()
    up = ((rounded - low) / gap).mean().item()
    assert set(rounded.unique().tolist()) <= {low, low + gap}
    assert abs(up - between) <= 4 * (between * (1 - between) / n) ** 0.5 + 1e-6


def test_bfloat16_values_infinities_and_nans_stay_what_they_are():
    x = torch.tensor(
        [0.0, -0.0, 1.5, -(2.0**-126), 3.0e38, float("inf"), -float("inf"), float("nan")]
    )
    x = x.bfloat16().float()
    for salt in range(20):
        torch.testing.assert_close(
            _to_bf16(x, bits(len(x), salt)).float(), x, rtol=0, atol=0, equal_nan=True
        )


def test_bits_follow_from_place_and_salt_alone():
    whole = bits(100, salt=5)
    assert torch.equal(whole[40:], bits(60, salt=5, first=40))
    assert not torch.equal(whole, bits(100, salt=6))
    assert len((bits(2**16) & 0xFFFF).unique()) > 0.6 * 2**16  # 1 - 1/e of all values


def final_weight(optimizer_of, dtype, steps=400) -> float:
    """The mean of 64x64 weights of 1 after many steps with the gradient 1."""
    p = nn.Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = optimizer_of([p])
    for _ in range(steps):
        p.grad = torch.ones_like(p)
        optimizer.step()
    return p.detach().float().mean().item()


def stepped(groups) -> list[torch.Tensor]:
    """Equal bf16 weights after one step with equal gradients; `groups` cuts them up."""
    weights = [nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(4)]
    optimizer = CompactAdamW(groups(weights), 2e-3, "bf16")
    for p in weights:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return weights


def test_weights_of_different_groups_are_rounded_by_different_chances():
    """LoRA+ has two groups; of two coins with chance p, 2 p (1 - p) fall differently."""
    alone, cut = (
        stepped(lambda ws: ws),
        stepped(lambda ws: [dict(params=ws[:2]), dict(params=ws[2:])]),
    )
    for a, b in itertools.combinations(cut, 2):
        p = (a != 1).float().mean().item()
        assert 0.1 < p < 0.9
        assert abs((a != b).float().mean().item() - 2 * p * (1 - p)) < 0.05
    for a, b in zip(alone, cut, strict=True):
        assert torch.equal(a, b)


def test_updates_too_small_for_bfloat16_add_up():
    """With a constant gradient each step of Adam is the learning rate: 400 of 1e-4 make 0.04."""
    assert final_weight(lambda p: torch.optim.AdamW(p, 1e-4, weight_decay=0), torch.bfloat16) == 1
    for kind in ("bf16", "8bit"):
        reached = final_weight(lambda p, kind=kind: CompactAdamW(p, 1e-4, kind), torch.bfloat16)
        assert reached == pytest.approx(1 - 0.04, abs=0.0005)


def losses(optimizer_of, dtype=torch.float32, steps=150) -> list[float]:
    """Losses of a two-layer network learning another one's outputs."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(dtype)
    optimizer, found = optimizer_of(model.parameters()), []
    for _ in range(steps):
        x = torch.randn(32, 64)
        loss = nn.functional.mse_loss(model(x.to(dtype)).float(), teacher(x).detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "kind, dtype",
    [
        ("bf16", torch.float32),
        ("8bit", torch.float32),
        ("bf16", torch.bfloat16),
        ("8bit", torch.bfloat16),
    ],
)
def test_small_states_learn_as_float32_adamw(kind, dtype):
    reference = losses(lambda p: torch.optim.AdamW(p, 3e-3))
    ours = losses(lambda p: CompactAdamW(p, 3e-3, kind, weight_decay=0.01), dtype)
    assert reference[-1] < 0.3 * reference[0]
    assert sum(ours[-20:]) == pytest.approx(sum(reference[-20:]), rel=0.1)


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_weights_updated_together_are_those_updated_alone(kind, monkeypatch):
    """Bit-equal: rounding follows from a weight's salt and place, and no block spans two weights."""

    def trained(together: int) -> list[torch.Tensor]:
        monkeypatch.setattr("fsdp_qlora.optim.adamw.TOGETHER", together)
        generator = torch.Generator().manual_seed(0)
        shapes = [(64, 256), (32, 512), (96, 64), (128,), (7, 50), (64, 256), (300, 128)]
        weights = [
            nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for dtype in (torch.bfloat16, torch.float32)
            for shape in shapes
        ]
        groups = [dict(params=weights[::2]), dict(params=weights[1::2], lr=3e-3)]
        optimizer = CompactAdamW(groups, 1e-2, kind)
        for _ in range(4):
            for p in weights:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            optimizer.step()
        return [t.detach() for p in weights for t in (p, *optimizer.state[p].values())]

    for alone, together in zip(trained(0), trained(2**24), strict=True):
        assert torch.equal(alone, together)


def test_an_8_bit_state_takes_a_byte_a_weight_and_a_scale_a_block():
    weight = nn.Parameter(torch.zeros(96, 512, dtype=torch.bfloat16))
    narrow, bias = nn.Parameter(torch.zeros(96, 50)), nn.Parameter(torch.zeros(512))
    optimizer = CompactAdamW([weight, narrow, bias], 1e-3, "8bit")
    for p in (weight, narrow, bias):
        p.grad = torch.ones_like(p)
    optimizer.step()
    sizes = {
        name: value.nbytes for name, value in optimizer.state[weight].items() if name != "step"
    }
    assert sizes == {
        "exp_avg": 96 * 512,
        "exp_avg_sq": 96 * 512,
        "exp_avg_absmax": 96 * 2 * 4,
        "exp_avg_sq_absmax": 96 * 2 * 4,
    }
    for p in (narrow, bias):
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_a_loaded_state_goes_on_as_the_saved_one(kind):
    """torch's load_state_dict alone would cast 8-bit codes and float32 scales to bfloat16."""

    def step(p, optimizer, seed):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p)
        optimizer.step()

    one = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    first = CompactAdamW([one], 1e-2, kind)
    for seed in range(3):
        step(one, first, seed)
    two = nn.Parameter(one.detach().clone())
    second = CompactAdamW([two], 1e-2, kind)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for seed in range(3, 6):
        step(one, first, seed)
        step(two, second, seed)
    assert torch.equal(one, two)
    for name, value in first.state[one].items():
        torch.testing.assert_close(value, second.state[two][name], rtol=0, atol=0)  # dtypes too


def test_the_compiled_update_is_the_plain_one_and_compiled_once_for_all_rates():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(_adamw_update, fullgraph=True, dynamic=True)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 5):
        plain = [torch.randn(1000 * step, generator=generator).bfloat16() for _ in range(2)]
        plain += [torch.rand(1000 * step, generator=generator) for _ in range(2)]
        other = [t.clone() for t in plain]
        factors = torch.tensor(_update_factors(GROUP | dict(lr=1e-2 / step), step))
        places = torch.tensor([step, int32(step * 10**10)], dtype=torch.int32)
        _adamw_update(*plain, factors, places)
        compiled(*other, factors, places)
        assert (
            plain[0] == other[0]
        ).float().mean() > 0.995  # a last bit of float32 may tip a rounding
        torch.testing.assert_close(plain[2:], other[2:], rtol=1e-6, atol=1e-7)
    assert counters["stats"]["unique_graphs"] == 1
