"""Ranks that were started with other settings or files are refused at the start, by their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.distributed.test_resume import change_weights, rows_of, settings
from tests.ranks import run_ranks
from tests.tokenizers import save_chat_model


def refusals(folder: str, other: str, out: str) -> list[str]:
    """What a run says in which rank 2 is given something else; "" if it was trained."""
    import torch
    import torch.distributed as dist

    from fsdp_qlora.data import tokenize_rows
    from fsdp_qlora.preflight.run_data import run_tokenizer
    from fsdp_qlora.training import trainer

    config, tokenizer = settings(folder, out, max_steps=1), run_tokenizer(settings(folder, out))
    odd = dist.get_rank() == 2

    def tokens(rows):
        return tokenize_rows(rows, tokenizer, context_length=64)

    rows, held = rows_of(11), rows_of(3, 20)

    def said(config=config, rows=rows, held_out=held, tokenizer=tokenizer):
        try:
            trainer.train(config, tokens(rows), torch.device("cpu"), tokenizer, tokens(held_out))
            return ""
        except ValueError as error:
            return str(error)

    changed = [
        replace(config, **{name: value})
        for name, value in (
            ("seed", 43),
            ("lr", 0.5),
            ("lora_rank", 2),
            ("sharding_strategy", "shard_grad_op"),
            ("model_name", other),
        )
    ]
    found = [said(case if odd else config) for case in changed]
    found += [said(rows=case if odd else rows) for case in (rows_of(11, 7), rows[:-1], rows[::-1])]
    found.append(said(held_out=rows_of(3, 21) if odd else held))
    strict = run_tokenizer(config)
    strict.chat_template = "{{ messages[0].content }}"
    found.append(said(tokenizer=strict if odd else tokenizer))
    assert not Path(out, "checkpoints").exists()  # not even looked for a run to go on with
    elsewhere = replace(config, log_to="stdout", timeout_minutes=9.0, data_cache="elsewhere")
    return [*found, said(elsewhere if odd else config)]


def test_a_rank_with_other_settings_rows_or_weights_is_refused_by_name_on_every_rank(tmp_path):
    folder, other = (save_chat_model(tmp_path / name, num_hidden_layers=1) for name in ("a", "b"))
    change_weights(other)
    expected = [
        "--seed is 43, and 42 on rank 0",
        "--lr is 0.5, and 0.01 on rank 0",
        "--lora_rank is 2, and 4 on rank 0",
        "--sharding_strategy is shard_grad_op, and full_shard on rank 0",
        "--model_name holds other weights than on rank 0",
        *["--dataset holds other rows than on rank 0"] * 3,
        "--eval_dataset holds other held-out rows than on rank 0",
        "--model_name is another tokenizer than on rank 0",
    ]
    results = run_ranks(refusals, 3, folder, other, str(tmp_path / "out"))
    assert results[0] == results[1] == results[2]
    *refused, trained = results[0]
    assert trained == ""
    for text, words in zip(refused, expected, strict=True):
        assert text == f"rank 2: {words}; give every rank the same command and the same files"
