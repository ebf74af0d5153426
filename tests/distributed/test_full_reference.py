"""The reference policy of DPO, KTO and GRPO where all weights are trained is a second model: it lies in
shards as the policy does, and gives the values of plain TRL's."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_other_trainers import (
    STEPS,
    curve,
    even_characters,
    trainer,
)
from tests.distributed.test_parity import relative
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

RATE = dict(learning_rate=1e-3)  # of all weights
FULL = dict(peft_config=None, quant="none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("model"), vocab_size=300)


def share_held(model: torch.nn.Module) -> float:
    """Of the numbers of a model's weights, the part that this rank holds."""
    from fsdp_qlora.dist import local_rows

    weights = list(model.parameters())
    return sum(local_rows(p.detach())[0].numel() for p in weights) / sum(p.numel() for p in weights)


def learn(folder: str, output: str) -> dict:
    """By kind, strategy and how the reference is given: the share of it held here, and the curve."""
    from transformers import AutoModelForCausalLM

    from fsdp_qlora.integrations import trl

    found = {}
    for kind, strategy, given in [
        ("DPO", "full_shard", {}),
        ("KTO", "shard_grad_op", {}),
        ("DPO", "ddp", {}),
        ("DPO", "full_shard", dict(ref_model=True)),
    ]:
        model = folder
        if given:
            model, given = (
                AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in "12"
            )
            given = dict(ref_model=given)
        more = FULL | given | dict(sharding_strategy=strategy)
        made = trainer(trl, kind, folder, model, output, RATE, **more)
        share = share_held(made.ref_model)
        made.train()
        found[kind, strategy, bool(given)] = share, curve(made)
    grpo = dict(max_steps=1, per_device_train_batch_size=4)
    more = FULL | dict(reward_funcs=even_characters)
    made = trainer(trl, "GRPO", folder, folder, output, RATE | grpo, **more)
    share = share_held(made.ref_model)
    made.train()
    found["GRPO"] = share, [h["kl"] for h in made.state.log_history if "kl" in h]
    return found


def learn_plain(folder: str, output: str) -> dict:
    import trl
    from transformers import AutoModelForCausalLM

    found = {}
    for kind in ("DPO", "KTO"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        given = RATE | dict(per_device_train_batch_size=4)
        made = trainer(trl, kind, folder, model, output, given, peft_config=None)
        made.train()
        found[kind] = curve(made)
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_reference_of_its_own_is_sharded_and_gives_plain_trls_values(folder, tmp_path):
    (plain,) = run_ranks(learn_plain, 1, folder, str(tmp_path), timeout=600)
    for found in run_ranks(learn, 2, folder, str(tmp_path), timeout=600):
        share, divergence = found.pop("GRPO")
        assert share == pytest.approx(0.5, abs=0.02) and divergence == [0.0]
        for (kind, strategy, _), (share, points) in found.items():
            assert share == pytest.approx(1.0 if strategy == "ddp" else 0.5, abs=0.02), strategy
            assert len(points) == STEPS
            assert relative(points, plain[kind]) < (1e-4 if kind == "KTO" else 1e-5), kind
