"""The frozen embedding and head by rows: what they give is what whole ones give, on every rank."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.families import save_family
from tests.ranks import run_ranks
from tests.tiny import padded_batch, save_tiny, tiny_rows

VOCAB = 97  # no multiple of 2 or 3


class ScaledEmbedding(nn.Embedding):
    """As Gemma's."""

    def forward(self, ids):
        return super().forward(ids) * 8.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        tied: save_tiny(tmp_path_factory.mktemp(str(tied)), tie_word_embeddings=tied)
        for tied in (False, True)
    }


def plain_model(folder: str, scaled: bool = False, dtype=torch.float32):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).requires_grad_(False)
    if scaled:
        model.get_input_embeddings().__class__ = ScaledEmbedding
    return model.eval()


def by_rows(folders: dict, piece_bytes: int, dtype: torch.dtype) -> list[tuple]:
    """Whether embeddings, logits and losses equal those of a whole model; rows of each weight."""
    import torch.distributed as dist

    from fsdp_qlora.dist import shard_mesh
    from fsdp_qlora.memory import vocab_parallel
    from fsdp_qlora.memory.chunked_cross_entropy import apply_chunked_cross_entropy

    vocab_parallel.PIECE_BYTES = piece_bytes
    results = []
    for tied, folder in folders.items():
        for scaled in (False, True):
            whole, model = (plain_model(folder, scaled, dtype) for _ in range(2))
            apply_chunked_cross_entropy(model)
            apply_chunked_cross_entropy(whole)
            weights = vocab_parallel.apply_vocab_parallel(model, shard_mesh(torch.device("cpu")))
            assert len(set(weights)) == 2 - tied
            batch = padded_batch(
                tiny_rows(1, 1 + 2 * dist.get_rank())[0]
            )  # other shapes on each rank
            ids = batch["input_ids"]
            few = ids.flatten()[:20]  # of all ranks fewer than the vocabulary has: rows travel
            same = (
                *(
                    torch.equal(*(m.get_input_embeddings()(part) for m in (model, whole)))
                    for part in (few, ids)
                ),
                torch.equal(model(ids).logits, whole(ids).logits),
                torch.equal(model(**batch).loss, whole(**batch).loss),
            )
            results.append((same, [w.to_local().shape[0] for w in weights]))
    return results


@pytest.mark.parametrize(
    "world_size, piece_bytes, dtype",
    [(1, 2**27, torch.float32), (2, 2**27, torch.bfloat16), (3, 40 * 64 * 4, torch.float32)],
)
def test_embeddings_logits_and_losses_are_those_of_whole_weights(
    folders, world_size, piece_bytes, dtype
):
    """With the small piece, some ids per exchange."""
    by_rank = run_ranks(by_rows, world_size, folders, piece_bytes, dtype)
    assert all(all(same) for results in by_rank for same, _ in results)
    for rows in zip(*[[r for _, r in results] for results in by_rank], strict=True):
        assert all(sum(parts) == VOCAB for parts in zip(*rows, strict=True))


def test_rows_in_host_memory_come_in_pieces(monkeypatch):
    """The device is stood in for by another: on a CPU both are one."""
    from fsdp_qlora.memory import vocab_parallel

    weight, ids = torch.randn(VOCAB, 8), torch.randint(0, VOCAB, (50,))
    for first, stop in ((0, VOCAB), (40, VOCAB), (0, 13), (5, 5)):
        expected = torch.where(((ids >= first) & (ids < stop))[:, None], weight[ids], 0.0)
        for rows in (1, 7, VOCAB):
            monkeypatch.setattr(vocab_parallel, "PIECE_BYTES", rows * 8 * 4)
            found = vocab_parallel.own_rows(ids, weight[first:stop], first, in_pieces=True)
            assert torch.equal(found, expected)


def held_rows(folder: str, strategies: list[str]) -> list[list[int]]:
    """The rows of embeddings and head that are on this rank while the last block runs."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig
    from fsdp_qlora.memory.vocab_parallel import vocab_parallel_weights
    from fsdp_qlora.model.blocks import decoder_blocks

    found = []
    for strategy in strategies:
        model = build_model(
            RunConfig(model_name=folder, lora_rank=2, precision="fp32", sharding_strategy=strategy),
            torch.device("cpu"),
        )
        weights = vocab_parallel_weights(model)

        def look(*_, weights=weights):
            found.append([getattr(w, "_local_tensor", w).shape[0] for w in weights])

        decoder_blocks(model)[-1].register_forward_pre_hook(look)
        with torch.no_grad():
            model(**padded_batch(tiny_rows(1, 2)[0]))
    return found


@pytest.mark.parametrize("family, layers", [(None, 2), ("Gemma 3n", 3), ("Gemma 4", 3)])
def test_while_blocks_run_no_rank_has_more_than_its_rows(family, layers, folders, tmp_path):
    """Of embedding and head, and of Gemma's embedding for each block."""
    folder = save_family(tmp_path, family) if family else folders[False]
    for found in run_ranks(held_rows, 2, folder, ["full_shard", "shard_grad_op"]):
        assert len(found) == 2
        for held in found:
            assert len(held) == layers and all(rows in (48, 49) for rows in held)


def test_a_head_in_fp32_over_a_model_in_16_bits_gives_logits_in_fp32(folders):
    """As a trainer's `cast_lm_head_to_fp32` makes it; generation runs outside of autocast."""
    from fsdp_qlora.memory.vocab_parallel import apply_vocab_parallel

    model = plain_model(folders[False], dtype=torch.bfloat16)
    head = model.lm_head.float()
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        apply_vocab_parallel(model)
        logits = model(ids).logits
    assert hidden.dtype == torch.bfloat16 and logits.dtype == torch.float32
    assert torch.equal(logits, torch.nn.functional.linear(hidden.float(), head.weight))
