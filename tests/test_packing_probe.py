"""Packed rows that would see each other are found on the model's own code, before weights are read."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from fsdp_qlora.loading import meta_model
from fsdp_qlora.model.attention_kernels import VARLEN
from fsdp_qlora.model.packing_probe import keep_rows_apart, small

torch.set_num_threads(1)
SIZES = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    pad_token_id=0,
)
WINDOWS = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_local_experts=2, num_experts_per_tok=1)
# Models whose code keeps rows apart by itself, or once it is given the masks.
APART = {
    "llama": {},
    "qwen3": {},
    "gemma": {},
    "mistral": dict(sliding_window=8),
    "gemma3_text": WINDOWS,
    "mixtral": EXPERTS,
    "gpt_oss": WINDOWS | EXPERTS,
    "opt": dict(ffn_dim=64, word_embed_proj_dim=64, dropout=0.0),
    "afmoe": WINDOWS
    | dict(num_dense_layers=1, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=32),
    "recurrent_gemma": dict(
        lru_width=64, block_types=["recurrent", "attention"], attention_window_size=16
    ),
}
IMPLEMENTATIONS = {"gpt_oss": "eager"}


def made(family: str, **more):
    """A random model of the size of its config, with weights that tell, and its probe's verdict."""
    config = AutoConfig.for_model(family, **SIZES | more)
    used = IMPLEMENTATIONS.get(family, "sdpa")
    keep_rows_apart(meta_model(config, torch.float32, used))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=used
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.1)
    keep_rows_apart(model)
    return model


@pytest.mark.parametrize("family", APART)
def test_packed_rows_have_the_logits_that_transformers_gives_each_alone(family):
    model = made(family, **APART[family])
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    plain.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 97, (1, n), generator=generator) for n in (11, 4, 13)]
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    with torch.no_grad():
        packed = model(torch.cat(rows, 1), position_ids=positions, use_cache=False).logits
        alone = torch.cat([plain(row, use_cache=False).logits for row in rows], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", APART)
def test_a_small_instance_has_each_kind_of_layer_and_few_weights(family):
    config = AutoConfig.for_model(family, **APART[family] | dict(num_hidden_layers=2))
    tiny = small(config)
    kinds = [set(getattr(c, "layer_types", None) or ()) for c in (config, tiny)]
    assert kinds[0] == kinds[1]
    assert tiny.vocab_size <= 64 and tiny.num_hidden_layers <= 3 and tiny.hidden_size <= 2048


def test_a_kernel_that_is_told_where_rows_begin_needs_a_model_that_passes_it_on():
    """Of varlen and FlashAttention, which have no mask and need a GPU."""
    model = meta_model(AutoConfig.for_model("llama", **SIZES), torch.float32, VARLEN)
    keep_rows_apart(model)
    assert not model.get_decoder()._forward_pre_hooks  # nothing had to be given to it


class Forgetful(LlamaForCausalLM):
    """A model whose code keeps to itself where rows begin."""

    def forward(self, input_ids=None, position_ids=None, cu_seq_lens_q=None, **kwargs):
        return super().forward(input_ids, position_ids=position_ids, **kwargs)


def test_such_a_kernel_under_a_model_that_does_not_is_refused():
    model = Forgetful._from_config(
        AutoConfig.for_model("llama", **SIZES), attn_implementation=VARLEN
    )
    with pytest.raises(ValueError, match="packed rows of llama see each other"):
        keep_rows_apart(model)


def test_packing_of_a_model_that_cant_be_made_small_is_refused():
    model = meta_model(AutoConfig.for_model("llama", **SIZES), torch.float32)
    model.config.__dict__["num_attention_heads"] = None
    refused = "--packing true: whether packed rows of llama .*TypeError.*use --packing false"
    with pytest.raises(ValueError, match=refused):
        keep_rows_apart(model)
