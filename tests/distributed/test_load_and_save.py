"""Streaming load and saving on real ranks: memory, equal weights, PEFT's key names and shapes."""

from __future__ import annotations

import warnings

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.parts import rest, slow
from tests.ranks import run_ranks
from tests.tiny import RANK, SEED, padded_batch, reference_model, save_tiny, tiny_rows

MIB = 2**20
LARGE = dict(
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=11,
    num_attention_heads=8,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)


def resident_mib(field: str) -> float:
    """VmRSS or VmHWM of this process, in MiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(field))


def load_and_measure(folder: str, settings: dict) -> dict:
    """Extra resident memory at the peak of building and loading, and the size of the shards."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.dist import full_tensor, local_rows

    config = RunConfig(model_name=folder, precision="bf16", lora_rank=4, **settings)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # restart the high-water mark
    before = resident_mib("VmRSS")
    model = build_model(config, torch.device("cpu"))
    peak = resident_mib("VmHWM")
    shards = sum(local_rows(p)[0].nbytes for p in model.parameters()) / MIB
    state = {
        n: full_tensor(p.detach()).clone()
        for n, p in model.named_parameters()
        if "layers.0." in n and ".lora_" not in n
    }
    return dict(extra=peak - before, shards=shards, state=state)


@pytest.mark.parametrize("train_type", [rest("qlora"), slow("lora")])
def test_four_ranks_load_with_little_more_memory_than_their_shards(tmp_path, train_type):
    # bf16 weights of 400 MB, made here tensor by tensor.
    from fsdp_qlora.loading import expected_shapes, meta_model
    from fsdp_qlora.loading.weight_files import RandomCheckpoint

    config = LlamaConfig(**LARGE)
    config.save_pretrained(tmp_path)
    shapes = expected_shapes(meta_model(config, torch.bfloat16))
    source = RandomCheckpoint(shapes, torch.device("cpu"))
    weights = {n: source.rows(n, 0, s[0]).bfloat16() for n, s in shapes.items()}
    assert sum(w.nbytes for w in weights.values()) > 380 * MIB
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    case = dict(train_type=train_type, sharding_strategy="full_shard")
    ranks = run_ranks(load_and_measure, 4, str(tmp_path), case)
    extra, shards = (sum(r[key] for r in ranks) for key in ("extra", "shards"))
    assert extra < 1.5 * shards + 4 * 100, (extra, shards)
    for rank in ranks:
        assert_layer_equals(rank["state"], weights, train_type)


def assert_layer_equals(state: dict, weights: dict, train_type: str):
    """Gathered parameters equal the checkpoint, or bitsandbytes' quantization of it."""
    from bitsandbytes.functional import quantize_4bit

    for name, value in state.items():
        key = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        quantized = train_type == "qlora" and "_proj" in key
        whole = weights[key.replace(".absmax", ".weight")]
        if not quantized:
            torch.testing.assert_close(value, whole, rtol=0, atol=0)
        else:
            packed, quant_state = quantize_4bit(whole, quant_type="nf4", blocksize=64)
            if name.endswith("absmax"):
                assert torch.equal(value.flatten(), quant_state.absmax)
            else:
                assert torch.equal(value.view(torch.uint8).flatten(), packed.flatten())


def train_and_save(folder: str, out: str, cases: list[dict], steps) -> list[torch.Tensor]:
    """Train each case a little, save it, and return the live logits of the first rows."""
    from dataclasses import asdict

    import torch.distributed as dist

    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.export import save_trained
    from fsdp_qlora.optim import build_optimizer
    from fsdp_qlora.training.step import train_step

    logits = []
    for i, case in enumerate(cases):
        config = RunConfig(
            **dict(
                model_name=folder,
                precision="fp32",
                lora_rank=RANK,
                lora_alpha=8,
                lora_dropout=0.0,
                seed=SEED,
            )
            | case
        )
        model = build_model(config, torch.device("cpu"))
        optimizer = build_optimizer(model, "adamw", 1e-2)
        for rows in steps:
            mine = rows[dist.get_rank() :: dist.get_world_size()]
            train_step(model, optimizer, [padded_batch(mine)])
        save_trained(model, f"{out}/{i}", settings=asdict(config))
        batch = padded_batch(steps[0])
        with torch.no_grad():
            logits.append(
                model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            )
    return logits


def reloaded(folder: str, out: str, cases: list[dict], steps) -> list[torch.Tensor]:
    """The logits of models with other first values, once their adapters are those of the folders."""
    import fsdp_qlora as fq

    batch, found = padded_batch(steps[0]), []
    for i, case in enumerate(cases):
        config = fq.RunConfig(
            **dict(
                model_name=folder,
                precision="fp32",
                lora_rank=RANK,
                lora_alpha=8,
                lora_dropout=0.0,
                seed=SEED + 1,
            )
            | case
        )
        model = fq.load_adapter(fq.build_model(config, torch.device("cpu")), f"{out}/{i}")
        with torch.no_grad():
            found.append(
                model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            )
    return found


def test_a_saved_adapter_loads_on_another_number_of_ranks(tmp_path):
    folder, steps = save_tiny(tmp_path / "model"), tiny_rows(2, 4)
    cases = [
        dict(train_type="qlora", sharding_strategy="full_shard"),
        dict(train_type="bnb_dora", sharding_strategy="ddp"),
        dict(train_type="lora", init_lora_weights="pissa"),
    ]
    live = run_ranks(train_and_save, 2, folder, str(tmp_path / "out"), cases, steps)[0]
    # What PiSSA saves fits the original base, at twice the rank.
    again = [
        case | dict(init_lora_weights="default", lora_rank=2 * RANK, lora_alpha=16)
        if "init_lora_weights" in case
        else case
        for case in cases
    ]
    for case, ours, logits in zip(
        cases,
        run_ranks(reloaded, 3, folder, str(tmp_path / "out"), again, steps)[0],
        live,
        strict=True,
    ):
        torch.testing.assert_close(ours, logits, rtol=1e-5, atol=1e-5, msg=str(case))


@pytest.mark.parametrize("worlds", [[2], slow([1])])
def test_saved_adapter_is_what_peft_would_have_saved(tmp_path, worlds):
    folder, steps = save_tiny(tmp_path / "model"), tiny_rows(2, 4)
    batch = padded_batch(steps[0])
    inputs = dict(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    for world_size in worlds:
        out = tmp_path / str(world_size)
        cases = [
            dict(train_type=t, sharding_strategy=s)
            for t in ("lora", "qlora")
            for s in ("full_shard", "ddp")
        ] + [dict(train_type="lora", lora_rank=1)]
        logits = run_ranks(train_and_save, world_size, folder, str(out), cases, steps)[0]
        for i, case in enumerate(cases):
            reference = reference_model(folder, case["train_type"])
            reference.save_pretrained(tmp_path / "reference")
            saved = load_file(out / str(i) / "adapter_model.safetensors")
            expected = load_file(tmp_path / "reference" / "adapter_model.safetensors")
            assert saved.keys() == expected.keys()
            if case.get("lora_rank") != 1:
                assert all(saved[k].shape == expected[k].shape for k in saved)
            assert all(t.dim() == 2 and t.numel() for t in saved.values())
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                reloaded = PeftModel.from_pretrained(
                    reference.unload(), out / str(i), is_trainable=True
                )
            # Not in eval mode: there bitsandbytes repacks for a CPU kernel that rounds to bf16.
            torch.testing.assert_close(
                reloaded(**inputs).logits.detach(), logits[i], rtol=1e-4, atol=1e-4
            )


def test_fully_tuned_model_is_saved_whole_and_reloads_in_transformers(tmp_path):
    for tied in (False, True):
        folder = save_tiny(tmp_path / f"model{tied}", tie_word_embeddings=tied)
        steps, out = tiny_rows(2, 4), tmp_path / f"out{tied}"
        cases = [dict(train_type="full", sharding_strategy="full_shard")]
        logits = run_ranks(train_and_save, 2, folder, str(out), cases, steps)[0][0]
        model = AutoModelForCausalLM.from_pretrained(out / "0").eval()
        batch = padded_batch(steps[0])
        reloaded = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
        torch.testing.assert_close(reloaded.detach(), logits, rtol=1e-5, atol=1e-5)
        names = load_file(out / "0" / "model.safetensors").keys()
        assert ("lm_head.weight" in names) != tied
        assert model.config.tie_word_embeddings == tied


def save_where_it_fails(folder: str, out: str) -> str:
    """The error that a rank gets when rank 0 cannot write."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.export import save_trained

    model = build_model(
        RunConfig(model_name=folder, precision="fp32", lora_rank=2), torch.device("cpu")
    )
    try:
        save_trained(model, f"{out}/a-file/adapter")
    except OSError as error:
        return str(error)
    return ""


def test_a_write_error_on_rank_0_stops_all_ranks_with_its_reason(tmp_path):
    folder = save_tiny(tmp_path / "model")
    (tmp_path / "a-file").write_text("not a folder")
    errors = run_ranks(save_where_it_fails, 2, folder, str(tmp_path), timeout=60)
    assert all("rank 0 could not write" in error for error in errors), errors
