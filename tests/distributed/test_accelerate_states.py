"""accelerate's own saving of a model that is sharded here: a state is whole and resumes to the bit, and what
would write one rank's shards says what to call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_own_loops import message_of
from tests.own_loops import losses_of_steps
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model

CASES = [("full_shard", "nf4"), ("ddp", "nf4"), ("shard_grad_op", "none")]  # none: all weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("model"), vocab_size=300)


def prepared(folder: str, strategy: str, quant: str, output: str):
    """An accelerator with automatic names, and the model, optimizer and scheduler that it prepared."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration
    from peft import LoraConfig, get_peft_model

    from fsdp_qlora import trainable_parameters
    from fsdp_qlora.integrations.streamed import shard_and_load, streamed_model

    naming = ProjectConfiguration(output, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=naming)
    model = streamed_model(folder, quant)
    if quant != "none":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    shard_and_load(model, accelerator.device, sharding_strategy=strategy)
    optimizer = torch.optim.AdamW(trainable_parameters(model).values(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def steps(accelerator, model, optimizer, scheduler, numbers) -> list[float]:
    rank = accelerator.process_index
    return losses_of_steps(model, optimizer, numbers, rank, accelerator.backward, scheduler)


def saved_and_resumed(folder: str, output: str) -> list:
    """By case: losses after a state was saved, those of a new model that loads it, and what is refused."""
    found = []
    for strategy, quant in CASES:
        where = f"{output}/{strategy}"
        made = prepared(folder, strategy, quant, where)
        steps(*made, range(2))
        accelerator, model, *_ = made
        accelerator.save_state()
        after = steps(*made, range(2, 4))
        again = prepared(folder, strategy, quant, where)
        again[0].load_state()
        resumed = steps(*again, range(2, 4))
        refused = [
            message_of(accelerator.save_model, model, f"{where}/model"),
            message_of(accelerator.get_state_dict, model),
            message_of(model.save_pretrained, f"{where}/{accelerator.process_index}"),
            message_of(again[0].load_state, folder),
        ]
        found.append((after, resumed, refused))
    return found


@pytest.mark.filterwarnings("ignore")
def test_a_state_resumes_to_the_bit_and_other_ways_to_save_say_what_to_call(folder, tmp_path):
    for found in run_ranks(saved_and_resumed, 2, folder, str(tmp_path)):
        for (strategy, _), (after, resumed, refused) in zip(CASES, found, strict=True):
            assert resumed == after and len(set(after)) == 2
            model, state, pretrained, load = refused
            assert "save_trained(model, folder)" in model
            assert folder in load and "shard_and_load" in load
            # Under ddp each rank has all weights, and PEFT's own files are whole.
            assert (
                ("save_adapter" in state) == ("save_adapter" in pretrained) == (strategy != "ddp")
            )
    state = tmp_path / "full_shard" / "checkpoints" / "checkpoint_0"
    ours = load_file(state / "model" / "adapter_model.safetensors")
    assert ours.keys() == load_file(tmp_path / "ddp" / "0" / "adapter_model.safetensors").keys()
    assert not (state / "model.safetensors").exists() and not (state / "optimizer.bin").exists()


# ---- rows of more ranks ----------------------------------------------------------------------------


def write_states(folder: str, seed: int) -> torch.Tensor:
    """Each rank's rows of one optimizer, into a folder that other ranks may have written before."""
    from torch import nn

    import fsdp_qlora as fq
    from fsdp_qlora.integrations.states import load_optimizer, save_optimizer

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 24, bias=False))
    fq.apply_sharding(model, "full_shard", wrap_policy=lambda m: isinstance(m, nn.Linear))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.full((2, 8), float(seed))).sum().backward()
    optimizer.step()
    save_optimizer(Path(folder), model, optimizer)
    torch.distributed.barrier()
    load_optimizer(Path(folder), model, optimizer)
    (state,) = optimizer.state.values()
    return fq.full_tensor(state["momentum_buffer"]).clone()


def test_a_folder_that_more_ranks_wrote_before_has_none_of_their_rows(tmp_path):
    """Rows of rank 4 of 6 would lie in the last of 4, and before them."""
    run_ranks(write_states, 6, str(tmp_path), 1)
    for momentum in run_ranks(write_states, 4, str(tmp_path), 5):
        assert (momentum == 10).all()
    assert len(list(tmp_path.glob("rank-*"))) == 4
