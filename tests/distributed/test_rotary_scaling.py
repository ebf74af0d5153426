"""A model built on meta, on every rank, has the rotary frequencies of transformers, scaled or not.

They are in no checkpoint: a build that leaves them as `to_empty` gives them computes garbage, and one
that drops the scaling reads long inputs as gibberish.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, Phi3Config

from tests.ranks import run_ranks
from tests.tiny import CONFIGS, save_tiny

ORIGINAL = 32
BASE = dict(rope_theta=10_000.0)
LONG = dict(original_max_position_embeddings=ORIGINAL)
SCALINGS = {
    "none": {},
    "linear": dict(rope_type="linear", factor=4.0, **BASE),
    "dynamic": dict(rope_type="dynamic", factor=4.0, **BASE),
    "yarn": dict(rope_type="yarn", factor=4.0, **LONG, **BASE),
    "llama3": dict(
        rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, **LONG, **BASE
    ),
    "longrope": dict(
        rope_type="longrope",
        short_factor=[1.0] * 8,
        factor=4.0,
        long_factor=[1.0 + i / 2 for i in range(8)],
        **LONG,
        **BASE,
    ),
}
# Short, and beyond the 128 positions of the tiny models, where every scaling is of consequence.
INPUTS = [
    torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(length))
    for length in (12, 160)
]


def save_scaled(folder, scaling: str) -> str:
    settings = dict(rope_parameters=SCALINGS[scaling]) if SCALINGS[scaling] else {}
    if scaling != "longrope":
        return save_tiny(folder, **settings)
    CONFIGS["phi3"] = Phi3Config
    return save_tiny(
        folder, "phi3", pad_token_id=0, original_max_position_embeddings=ORIGINAL, **settings
    )


def logits_and_frequencies(folders: list[str]) -> list[dict]:
    """Of each model, built in the sharded way: logits of each input, buffers before and after."""
    from fsdp_qlora.build import build_model
    from fsdp_qlora.config import RunConfig

    results = []
    for folder in folders:
        model = build_model(
            RunConfig(model_name=folder, train_type="lora", precision="fp32", lora_rank=2),
            torch.device("cpu"),
        ).eval()
        buffers = {n.removeprefix("base_model.model."): b.clone() for n, b in model.named_buffers()}
        with torch.no_grad():
            results.append(
                dict(logits=[model(input_ids=ids).logits for ids in INPUTS], buffers=buffers)
            )
    return results


def test_logits_and_frequencies_equal_transformers_on_every_rank(tmp_path):
    folders = [save_scaled(tmp_path / scaling, scaling) for scaling in SCALINGS]
    by_rank = run_ranks(logits_and_frequencies, 2, folders)
    unscaled = None
    for i, (scaling, folder) in enumerate(zip(SCALINGS, folders, strict=True)):
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        buffers = dict(plain.named_buffers())
        with torch.no_grad():
            logits = [plain(input_ids=ids).logits for ids in INPUTS]
        for results in by_rank:
            assert results[i]["buffers"].keys() == buffers.keys()
            for name, buffer in results[i]["buffers"].items():
                assert torch.equal(buffer, buffers[name]) and buffer.dtype == torch.float32, scaling
            for ours, theirs in zip(results[i]["logits"], logits, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=scaling)
        if scaling == "none":
            unscaled = logits[1]
        elif scaling != "longrope":
            assert (logits[1] - unscaled).abs().max() > 1e-3, scaling
