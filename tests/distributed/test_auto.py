"""--sharding_strategy auto on two CPU ranks: plans, probes, goes down out of memory, remembers."""

import json

import pytest

from fsdp_qlora.bench.auto import with_changes
from fsdp_qlora.bench.drive import How
from fsdp_qlora.commands.probe import confirmed_changes
from fsdp_qlora.config import RunConfig
from fsdp_qlora.config.flags import parse
from fsdp_qlora.planner import free_settings

DEEP = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=97,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=24,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    pad_token_id=0,
)


@pytest.mark.slow
def test_a_plan_that_runs_out_of_memory_is_replaced_and_the_one_that_works_is_kept(
    tmp_path, capfd, monkeypatch
):
    """All activations take a rank 0.53 GiB, none 0.18; the probes may take 0.38."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("fsdp_qlora.commands.probe.STEPS", How(steps=1, warmup=0, minutes=10))
    (tmp_path / "config.json").write_text(json.dumps(DEEP))
    argv = [
        "--model_name",
        str(tmp_path),
        "--sharding_strategy",
        "auto",
        "--batch_size",
        "8",
        "--global_batch_size",
        "16",
        "--context_length",
        "512",
        "--device",
        "cpu",
        "--world_size",
        "2",
        "--compile",
        "false",
    ]
    (config,) = parse(argv)
    changes = confirmed_changes(config, argv, allowed_gib=0.38)
    said = capfd.readouterr().out
    assert "out of memory" in said and said.count("plan: ") >= 2 and "tokens/s per GPU" in said
    (chosen,) = parse(with_changes(argv, changes))
    assert not chosen.is_auto and (chosen.batch_size, chosen.global_batch_size) == (8, 16)
    assert chosen.activation_policy != "keep_all"
    assert confirmed_changes(config, argv, allowed_gib=0.38) == changes
    assert "plan of " in capfd.readouterr().out


def test_only_what_is_auto_is_chosen():
    auto = RunConfig(sharding_strategy="auto")
    assert free_settings(auto, set()) == {
        "sharding_strategy",
        "activation_policy",
        "use_cpu_offload",
        "use_activation_cpu_offload",
    }
    assert free_settings(auto, {"use_cpu_offload", "activation_policy"}) == {
        "sharding_strategy",
        "use_activation_cpu_offload",
    }
    assert free_settings(RunConfig(batch_size=-1), set()) == {"batch_size"}
    assert free_settings(RunConfig(activation_budget_gib=-1), set()) == {"activation_policy"}


def test_chosen_settings_replace_those_that_were_typed():
    argv = ["--lr", "1", "--sharding_strategy", "auto", "--batch_size=auto", "--verbose"]
    assert with_changes(argv, dict(sharding_strategy="ddp", batch_size=4)) == [
        "--lr",
        "1",
        "--verbose",
        "--sharding_strategy",
        "ddp",
        "--batch_size",
        "4",
    ]
