"""What a script changes when its model is sharded already: which weights are trained, adapters in turn, and
what of an adapter is saved and loaded while it is frozen. Plain PEFT in one process is the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.distributed.test_own_loops import message_of
from tests.distributed.test_parity import flat, relative
from tests.ranks import run_ranks
from tests.tiny import RANK, TARGETS, padded_batch, save_tiny, tiny_rows

STRATEGIES = ("ddp", "shard_grad_op", "full_shard")
ROWS = tiny_rows(steps=1, rows_per_step=4)[0]
BATCHES = [padded_batch(ROWS[:2]), padded_batch(ROWS[2:])]  # one for each rank


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def two_adapters(folder: str, adapt=get_peft_model, seed: int = 0):
    """A model with two adapters, drawn from torch's generator; PEFT's or, by `apply_adapters`, ours."""
    torch.manual_seed(seed)
    config = dict(
        task_type="CAUSAL_LM", r=RANK, target_modules=TARGETS, init_lora_weights=False, lora_alpha=8
    )
    model = adapt(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(**config))
    model.add_adapter("second", LoraConfig(**config))
    return model.train()


def sharded(folder: str, strategy: str, seed: int = 0, **more):
    """The same, ours, on ranks that may be seeded apart."""
    import fsdp_qlora as fq

    model = two_adapters(folder, fq.apply_adapters, seed)
    fq.apply_sharding(model, strategy, **more)
    return model


def of_adapters(model) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if "lora_" in n}


def whole(model) -> dict[str, torch.Tensor]:
    import fsdp_qlora as fq

    return {n: fq.full_tensor(p.detach()).clone() for n, p in of_adapters(model).items()}


def step(model, optimizer, batches, before_backward=lambda: None):
    losses = [model(**batch).loss for batch in batches]
    before_backward()
    (sum(losses) / len(losses)).backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad()


# ---- which weights are trained -----------------------------------------------------------------


def in_turns(model, batches):
    """Two adapters trained in turn; one is chosen between a forward and its backward."""
    optimizer = torch.optim.SGD(of_adapters(model).values(), 0.05)
    for name in ("default", "second", "default"):
        model.set_adapter(name)
        step(model, optimizer, batches, lambda: model.set_adapter("second"))
    return whole(model)


def thawed(model, batches):
    """The first block's adapters join after a step, and the second block's are frozen after another."""
    first = [p for n, p in of_adapters(model).items() if "layers.0." in n and ".default." in n]
    second = [p for n, p in of_adapters(model).items() if "layers.1." in n and ".default." in n]
    for p in first:
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(second, 0.05)
    step(model, optimizer, batches)
    for p in first:
        p.requires_grad_(True)
    optimizer.add_param_group(dict(params=first, lr=0.02))
    step(model, optimizer, batches)
    for p in second:
        p.requires_grad_(False)
    step(model, optimizer, batches)
    return whole(model)


def with_a_prompt(model, batches):
    """A trained prompt before the rows."""
    optimizer = torch.optim.SGD([model.prompt], 0.05)
    for _ in range(2):
        losses = []
        for batch in batches:
            embedded = model.get_input_embeddings()(batch["input_ids"])
            prompts = model.prompt.expand(len(embedded), -1, -1)
            labels = torch.nn.functional.pad(batch["labels"], (4, 0), value=-100)
            losses.append(
                model(inputs_embeds=torch.cat([prompts, embedded], 1), labels=labels).loss
            )
        (sum(losses) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.prompt.detach().clone()


CHANGES = {"in turns": in_turns, "thawed": thawed}


def changed(folder: str, strategies, on_host: bool) -> dict[tuple, dict]:
    import fsdp_qlora as fq

    rank = fq.ranks_from_env().rank
    batches = BATCHES if fq.ranks_from_env().world_size == 1 else [BATCHES[rank]]
    more = dict(on_host=fq.OnHost(frozen=True)) if on_host else {}
    return {
        (strategy, name): change(sharded(folder, strategy, seed=rank, **more), batches)
        for strategy in strategies
        for name, change in CHANGES.items()
    }


@pytest.mark.parametrize(
    "ranks, strategies, on_host",
    [(2, STRATEGIES, False), (1, ("full_shard",), True)],
    ids=["two ranks", "one, weights streamed from the host"],
)
def test_weights_that_are_frozen_and_thawed_after_sharding_train_as_in_one_process(
    folder, ranks, strategies, on_host
):
    wanted = {name: change(two_adapters(folder), BATCHES) for name, change in CHANGES.items()}
    assert relative(*(flat(wanted[name], wanted["thawed"]) for name in wanted)) > 1e-3
    for found in run_ranks(changed, ranks, folder, strategies, on_host):
        for (strategy, name), weights in found.items():
            expected = flat(wanted[name], weights)
            assert relative(flat(weights, weights), expected) < 1e-6, (strategy, name)


def prompts(folder: str) -> torch.Tensor:
    import fsdp_qlora as fq

    model = sharded(folder, "ddp")
    model.prompt = torch.nn.Parameter(torch.ones(1, 4, 64))
    return with_a_prompt(model, [BATCHES[fq.ranks_from_env().rank]])


def test_a_prompt_that_comes_after_ddp_is_trained_by_all_ranks(folder):
    model = two_adapters(folder)
    model.prompt = torch.nn.Parameter(torch.ones(1, 4, 64))
    wanted = with_a_prompt(model, BATCHES)
    for found in run_ranks(prompts, 2, folder):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def refused(folder: str) -> dict[str, str]:
    """What is said of weights that no gradient would reach any more, and of hooks that would not run."""
    found = {}
    for name in ("get_input_embeddings", "get_output_embeddings"):
        model = sharded(folder, "full_shard")
        getattr(model, name)().weight.requires_grad_(True)
        found[f"{name}: frozen when the model was sharded"] = message_of(model, **BATCHES[0])
    for strategy in STRATEGIES[1:]:
        model = sharded(folder, strategy)
        model.prompt = torch.nn.Parameter(torch.zeros(1, 4, 64))
        found[f"{strategy}: prompt came after apply_sharding"] = message_of(model, **BATCHES[0])
    model = sharded(folder, "full_shard")
    next(p for p in model.parameters() if p.requires_grad).register_hook(lambda grad: 0 * grad)
    with torch.no_grad():
        model(**BATCHES[0])
    found["register_post_accumulate_grad_hook"] = message_of(model, **BATCHES[0])
    return found


def test_what_would_get_no_gradient_is_refused_with_the_remedy(folder):
    for found in run_ranks(refused, 2, folder):
        for wanted, said in found.items():
            assert wanted.split(": ")[-1] in said, (wanted, said)


def streamed_block_thawed(folder: str) -> str:
    import fsdp_qlora as fq

    model = sharded(folder, "full_shard", on_host=fq.OnHost(frozen=True))
    model(**BATCHES[0]).loss.backward()
    for n, p in model.named_parameters():
        p.requires_grad_("layers.1." in n)
    return message_of(model, **BATCHES[0])


def test_a_block_that_streams_from_the_host_is_not_thawed_in_silence(folder):
    (said,) = run_ranks(streamed_block_thawed, 1, folder)
    assert "frozen when the model was sharded" in said


# ---- what is saved and loaded of frozen parts ---------------------------------------------------


def saved_while_frozen(folder: str, out: str) -> dict:
    """Each strategy's adapter, saved with a frozen block and read into a model that is all frozen; and the
    states of an optimizer that has frozen weights, in another model's."""
    import fsdp_qlora as fq
    from fsdp_qlora.integrations.states import load_optimizer, save_optimizer

    rank, found = fq.ranks_from_env().rank, {}
    for strategy in STRATEGIES:
        model, where = sharded(folder, strategy), f"{out}/{strategy}"
        optimizer = torch.optim.AdamW(of_adapters(model).values(), 0.01)
        step(model, optimizer, [BATCHES[rank]])
        model.set_adapter("second")
        step(model, optimizer, [BATCHES[rank]])
        model.set_adapter("default")
        for n, p in of_adapters(model).items():
            if "layers.0." in n:
                p.requires_grad_(False)
        fq.save_adapter(model, where)
        save_optimizer(Path(where) / "states", model, optimizer)
        torch.distributed.barrier()
        other = sharded(folder, strategy, seed=1)
        same = torch.optim.AdamW(of_adapters(other).values(), 0.01)
        load_optimizer(Path(where) / "states", other, same)
        of_first, of_other = (
            [fq.full_tensor(o.state[p]["exp_avg"]) for p in of_adapters(m).values()]
            for m, o in ((model, optimizer), (other, same))
        )
        other.requires_grad_(False)
        fq.load_adapter(other, where)
        found[strategy] = whole(model), whole(other), of_first, of_other
    return found


def test_frozen_parts_of_an_adapter_and_states_of_frozen_weights_are_saved_and_loaded(
    folder, tmp_path
):
    for found in run_ranks(saved_while_frozen, 2, folder, str(tmp_path)):
        for strategy, (live, loaded, states, read) in found.items():
            file = load_file(tmp_path / strategy / "adapter_model.safetensors")
            default = {n: t for n, t in live.items() if ".default." in n}
            assert {n.replace(".default.", ".") for n in default} == file.keys()
            for name, tensor in default.items():
                assert torch.equal(loaded[name], tensor)
                assert torch.equal(file[name.replace(".default.", ".")], tensor)
            assert all(map(torch.equal, states, read)) and all(s.any() for s in states)


def loaded(folder: str, out: str) -> list[tuple[dict, dict, list[bool]]]:
    """By strategy: a model whose adapter PEFT has loaded after a forward, one that took all weights of a
    plain model, and whether each of these is that model's to the bit."""
    import fsdp_qlora as fq

    found = []
    plain = two_adapters(folder, fq.apply_adapters, seed=1)
    for strategy in STRATEGIES:
        model, other = sharded(folder, strategy), sharded(folder, strategy)
        model(**BATCHES[0])  # leaves weights gathered under shard_grad_op
        model.load_adapter(out, "default")
        with torch.no_grad():
            for p in other.parameters():
                fq.local_rows(p)[0].zero_()
        other.load_state_dict(plain.state_dict())
        same = [
            torch.equal(fq.full_tensor(p), q)
            for p, q in zip(other.parameters(), plain.parameters(), strict=True)
        ]
        step(model, torch.optim.SGD(of_adapters(model).values(), 0.0), [BATCHES[0]])
        found.append((whole(model), whole(other), same))
    return found


def test_whole_tensors_are_loaded_by_rows_through_peft_and_load_state_dict(folder, tmp_path):
    wanted = two_adapters(folder, seed=1)
    wanted.save_pretrained(tmp_path, selected_adapters=["default"])
    file = load_file(tmp_path / "adapter_model.safetensors")
    for found in run_ranks(loaded, 2, folder, str(tmp_path)):
        for by_peft, by_torch, same in found:
            for name, tensor in by_peft.items():
                if ".default." in name:
                    assert torch.equal(tensor, file[name.replace(".default.", ".")]), name
            assert len(by_torch) == 56 and all(same)


def test_one_process_without_a_group_saves_what_peft_saves(folder, tmp_path):
    import fsdp_qlora as fq

    model = two_adapters(folder)
    fq.save_adapter(model, tmp_path / "ours")
    model.save_pretrained(tmp_path, selected_adapters=["default"])
    ours, theirs = (
        load_file(p / "adapter_model.safetensors") for p in (tmp_path / "ours", tmp_path)
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in theirs)
