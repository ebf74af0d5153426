"""Fabric's own checkpoints of a sharded model resume to the bit; of a whole one they say what to call."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_own_loops import message_of
from tests.own_loops import losses_of_steps
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model


def saved_and_loaded(folder: str, output: str) -> dict:
    """Losses after a checkpoint, and those of a new model that loads it; what is said under ddp."""
    from lightning.fabric import Fabric
    from peft import LoraConfig, get_peft_model

    from fsdp_qlora import trainable_parameters
    from fsdp_qlora.integrations.fabric import ShardedStrategy
    from fsdp_qlora.integrations.streamed import streamed_model

    def set_up(strategy: str):
        fabric = Fabric(accelerator="cpu", devices=2, strategy=ShardedStrategy(strategy))
        fabric.launch()
        lora = LoraConfig(r=4, target_modules="all-linear")
        model = fabric.setup_module(get_peft_model(streamed_model(folder, "nf4"), lora))
        weights = trainable_parameters(model).values()
        return fabric, model, fabric.setup_optimizers(torch.optim.AdamW(weights, lr=1e-2))

    def steps(fabric, model, optimizer, numbers) -> list[float]:
        return losses_of_steps(model, optimizer, numbers, fabric.global_rank, fabric.backward)

    fabric, model, optimizer = made = set_up("full_shard")
    steps(*made, range(2))
    fabric.save(output, dict(model=model, optimizer=optimizer, step=2))
    after = steps(*made, range(2, 4))
    again = set_up("full_shard")
    state = dict(model=again[1], optimizer=again[2], step=0)
    again[0].load(output, state)
    resumed = steps(*again, range(2, 4))
    whole, model, _ = set_up("ddp")
    said = message_of(whole.save, output, dict(model=model))
    return dict(after=after, resumed=resumed, step=state["step"], said=said)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_fabric_resumes_to_the_bit_or_says_what_to_call(tmp_path):
    folder = save_chat_model(tmp_path / "model", vocab_size=300)
    for found in run_ranks(saved_and_loaded, 2, folder, str(tmp_path / "state"), grouped=False):
        assert found["resumed"] == found["after"] and found["step"] == 2
        assert found["said"].startswith("fabric.save") and "save_trained" in found["said"]
