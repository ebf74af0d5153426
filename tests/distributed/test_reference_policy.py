"""DPO's, KTO's and GRPO's reference is the policy itself while adapters are zero, to the bit."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from fsdp_qlora import full_tensor
from tests.distributed.test_other_trainers import curve, even_characters, trainer
from tests.distributed.test_own_loops import message_of
from tests.parts import rest, slow
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

COMPILED = dict(compile=True, mlp_tiles=2)
CASES = [  # kind, settings of ours
    ("DPO", dict(COMPILED, activation_policy="recompute_all")),
    ("DPO", dict(COMPILED, activation_policy="keep_linears", sharding_strategy="ddp")),
    ("DPO", dict(compile=True, activation_policy="keep_all")),
    ("DPO", dict(COMPILED, activation_policy="recompute_all", compute_dtype="fp8")),
    ("DPO", dict(activation_policy="recompute_all", use_activation_cpu_offload=True)),
    ("KTO", dict(COMPILED, activation_policy="recompute_all")),
    ("GRPO", dict(COMPILED, activation_policy="recompute_all")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in bf16."""
    from transformers import AutoModelForCausalLM

    folder = save_chat_model(tmp_path_factory.mktemp("bf16"), vocab_size=300, initializer_range=0.2)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def made(folder: str, output: str, kind: str, settings: dict, **given):
    from fsdp_qlora.integrations import trl

    more = dict(reward_funcs=even_characters) if kind == "GRPO" else {}
    given = given | (dict(per_device_train_batch_size=4) if kind == "GRPO" else {})
    torch._dynamo.reset()
    return trainer(trl, kind, folder, folder, output, given, quant="nf4", **settings, **more)


def first_steps(folder: str, output: str, cases: list[tuple]) -> list[tuple]:
    """What each case logs of its first step, and what its second block is told in each pass."""
    found, seen = [], note_passes()
    for kind, settings in cases:
        trained = made(folder, output, kind, settings, max_steps=1)
        assert trained.model.dtype == torch.bfloat16
        trained.train()
        (log,) = (h for h in trained.state.log_history if "loss" in h)
        found.append((log, seen[:]))
        seen.clear()
    return found


def note_passes() -> list[tuple]:
    """Will hold, of each pass through a compiled model but generation, what a graph is made for."""
    from fsdp_qlora.integrations import transformers as ours
    from fsdp_qlora.model.blocks import decoder_blocks

    compile_blocks, seen = ours.compile_blocks, []

    def noted(block, forward, hidden, *args, **kwargs):
        if kwargs.get("past_key_values") is None:
            weights = tuple(p.requires_grad for p in block.parameters())
            seen.append((torch.is_grad_enabled(), hidden.requires_grad, weights))
        return forward(hidden, *args, **kwargs)

    def compile_and_note(model, **settings):
        compile_blocks(model, **settings)
        block = decoder_blocks(model)[1]
        block.forward = partial(noted, block, block.forward)

    ours.compile_blocks = compile_and_note
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "world_size, cases",
    [rest(1, CASES[:1]), slow(1, CASES[1:]), rest(2, CASES[4:]), slow(2, CASES[:4])],
)
def test_the_first_step_sees_no_difference_to_the_reference(folder, tmp_path, world_size, cases):
    for results in run_ranks(first_steps, world_size, folder, str(tmp_path), cases, timeout=900):
        for (kind, settings), (log, seen) in zip(cases, results, strict=True):
            if kind == "DPO":
                assert abs(log["loss"] - math.log(2)) < 1e-6, settings
                assert log["rewards/chosen"] == log["rewards/rejected"] == 0
            else:
                assert log["kl"] == 0, (kind, settings)
            if settings.get("compile"):
                assert len(seen) > 1 and len(set(seen)) == 1 and seen[0][:2] == (True, True)


def with_and_without_offload(folder: str, output: str) -> list[tuple]:
    """Steps and adapters of DPO in fp32, and how many block inputs went to the host."""
    from fsdp_qlora.memory.activation_offload import _HostStore

    put, moved, found = _HostStore.put, [], []
    _HostStore.put = lambda store, hidden, *more: (
        moved.append(hidden.shape) or put(store, hidden, *more)
    )
    for offload in (False, True):
        moved.clear()
        given = dict(
            activation_policy="recompute_all",
            mlp_tiles=2,
            attention_tiles=2,
            use_activation_cpu_offload=offload,
        )
        trained = made(folder, output, "DPO", given, max_steps=3)
        trained.train()
        adapters = [full_tensor(p.detach()) for p in trained._trained()]
        found.append((curve(trained), adapters, len(moved)))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world_size", [1, rest(2)])
def test_offloaded_block_inputs_leave_dpo_as_it_is_and_the_reference_moves_nothing(
    tmp_path, world_size
):
    folder = save_chat_model(tmp_path / "fp32", vocab_size=300)
    for plain, offloaded in run_ranks(with_and_without_offload, world_size, folder, str(tmp_path)):
        torch.testing.assert_close(offloaded[:2], plain[:2], rtol=1e-6, atol=1e-6)
        assert plain[2] == 0 and offloaded[2] == 3  # of each step the first of two blocks


def test_what_would_have_no_effect_or_does_not_exist_is_refused_by_name(folder, tmp_path):
    (said,) = run_ranks(refusals, 1, folder, str(tmp_path))
    assert "use_activation_cpu_offload" in said[0] and "activation_policy" in said[0]
    assert "compute_dtype='fp4'" in said[1] and "bf16 or fp8" in said[1]


def refusals(folder: str, output: str) -> list[str]:
    cases = [
        dict(activation_policy="keep_all", use_activation_cpu_offload=True),
        dict(compute_dtype="fp4"),
    ]
    return [message_of(made, folder, output, "DPO", settings) for settings in cases]
