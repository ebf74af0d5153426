"""Whether packed rows see each other, tried on the model's own code before any weight is read.

Some models build their masks without positions, and some carry a state from token to token. Two short
rows go through a tiny random instance of the same class, together and apart: their logits must be the
same. A model whose code builds the wrong mask but takes a given one is given the right one.

Shapes: B bins, T tokens of a bin, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

import copy
import math
from functools import partial

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from .attention import masks_of_rows
from .blocks import base_model, output_head
from .row_mixers import mix_lines_apart, mix_rows_apart, row_mixers

ROWS = (5, 7)  # tokens of the two
WINDOW = 4  # so that windows end within a row
TOLERANCE = 1e-3  # of the largest logit; fp32 rounds at 1e-6, and a leak is of the logits' size
_BY_BORDERS = (
    "rows_by_borders"  # stands for kernels that are told where rows begin, which need a GPU
)
MOST_WEIGHTS = 4e8  # of an instance that is as wide as the model
# Fields and their size in the tiny instance, where a config has them and they are larger: numbers of
# things, and widths.
FEW = dict(
    vocab_size=64,
    vocab_size_per_layer_input=64,
    num_experts=4,
    num_local_experts=4,
    n_routed_experts=4,
    moe_num_experts=4,
    zero_expert_num=2,
    num_experts_per_tok=2,
    top_k_experts=2,
    moe_topk=2,
    moe_k=2,
    index_topk=4,
    mamba_chunk_size=8,
    chunk_size=8,
    n_group=1,
    topk_group=1,
    max_position_embeddings=64,
    sliding_window=WINDOW,
    attention_window_size=WINDOW,
    num_dense_layers=1,
    first_k_dense_replace=1,
)
NARROW = dict(
    intermediate_size=64,
    ffn_dim=64,
    ffn_hidden_size=64,
    expert_ffn_hidden_size=32,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    mamba_d_state=16,
    ssm_state_size=16,
)
# Heads of mixers, their size and their groups, where their product is a multiple of the width.
MIXERS = (
    ("mamba_n_heads", "mamba_d_head", "mamba_n_groups"),
    ("n_mamba_heads", "mamba_headdim", "mamba_ngroups"),
)


def keep_rows_apart(model: nn.Module):
    """Let packed rows of a model see only themselves: as it is, or under masks that it is given.

    Raises ValueError naming --packing where neither keeps them apart.
    """
    try:
        tiny = small_instance(model)
        if row_mixers(tiny):
            mix_rows_apart(tiny)
            mix_rows_apart(model)
        if _rows_are_apart(tiny):
            return
    except Exception as error:  # a config that can't be made small, or code that can't run so
        said = str(error).split("\n")[0]
        raise ValueError(
            f"--packing true: whether packed rows of {model.config.model_type} see each other can't be "
            f"tested on a small model of its kind ({type(error).__name__}: {said}); use --packing false"
        ) from error
    _give_masks(tiny)
    try:
        helped = _rows_are_apart(tiny)
    except Exception:  # it takes no mask of this form
        helped = False
    if not helped:
        raise ValueError(
            f"--packing true: packed rows of {tiny.config.model_type} see each other "
            "(tested with two short rows on a tiny model); use --packing false"
        )
    _give_masks(model)


def why_rows_meet(model: nn.Module) -> str:
    """Why packed rows would see each other under kernels that are told where rows begin; empty if none does.

    model: a language model, or a classifier on one, adapted or not; it stays as it is.
    """
    try:
        tiny = small_instance(model, _BY_BORDERS)
        mix_lines_apart(tiny)
        if _rows_are_apart(tiny):
            return ""
    except Exception as error:  # noqa: BLE001  sizes of a config that nobody has seen, or its code
        return f"a small model of its kind can't be tested ({type(error).__name__})"
    return "packed rows would see each other"


def small_instance(model: nn.Module, used: str | None = None) -> nn.Module:
    """A small random language model of the same code and layers, on the CPU in fp32, which has run.

    used: its attention, in place of the model's own. Raises what the last try raised: some sizes belong
    together in ways that no field tells, so widths as they are come second, unless that is too large.
    """
    model = base_model(model)
    config, kind = model.config.get_text_config(), type(model)
    if config is not model.config:
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    elif output_head(model) is None:  # a classifier
        kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), kind)
    used = used or model.config._attn_implementation
    if used not in ALL_MASK_ATTENTION_FUNCTIONS or "flash" in used:
        used = _BY_BORDERS
    elif used != "eager":
        used = "sdpa" if kind._supports_sdpa else "eager"
    try:
        return _made(kind, small(config), used)
    except Exception:
        if (wide := _shallow(config)) is None or not _fits(kind, wide):
            raise
        return _made(kind, wide, used)


def _made(kind: type, config: PretrainedConfig, used: str) -> nn.Module:
    """A random model of a class that gives logits of a few tokens. Raises what its code raises."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        tiny = kind._from_config(config, dtype=torch.float32, attn_implementation=used).eval()
        for p in tiny.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.1)
        with torch.no_grad():
            tiny(torch.arange(ROWS[0])[None], use_cache=False)
    return tiny


def _fits(kind: type, config: PretrainedConfig) -> bool:
    """Whether a model is small enough to be tried."""
    with torch.device("meta"):
        return sum(p.numel() for p in kind._from_config(config).parameters()) <= MOST_WEIGHTS


def small(config: PretrainedConfig) -> PretrainedConfig:
    """A config of the same kinds of layers with small sizes; heads keep theirs."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    groups = min(heads // (getattr(config, "num_key_value_heads", None) or heads), 8)
    config = _shallow(config)
    for name, value in NARROW.items():
        if type(now := getattr(config, name, None)) is int:
            setattr(config, name, min(now, value))
    config.num_attention_heads = 2 * groups if groups < 8 else groups
    if getattr(config, "num_key_value_heads", None):
        config.num_key_value_heads = config.num_attention_heads // groups
    for name in ("hidden_size", "word_embed_proj_dim", "lru_width"):
        if getattr(config, name, None):
            setattr(config, name, hidden * config.num_attention_heads // heads)
    _cut_mixers(config, hidden)
    return config


def _cut_mixers(config: PretrainedConfig, hidden: int):
    """Keep heads beside attention's in proportion to the width, which was `hidden`, if they were."""
    for number, size, groups in MIXERS:
        wide = getattr(config, "mamba_expand", 0) * hidden
        if wide and wide == getattr(config, number, 0) * getattr(config, size, 0):
            now = wide * config.hidden_size // hidden
            setattr(config, number, max(1, now // getattr(config, size)))
            setattr(config, size, now // getattr(config, number))
            if getattr(config, groups, None):
                setattr(config, groups, math.gcd(getattr(config, groups), getattr(config, number)))
    if getattr(config, "attention_head_dim", None):  # attention over two vectors of the width
        config.attention_hidden_size = config.num_attention_heads * config.attention_head_dim


def _shallow(config: PretrainedConfig) -> PretrainedConfig:
    """A config of the same widths with few tokens, layers and experts."""
    config = copy.deepcopy(config)
    config.allow_global_per_layer_attribute_access = (
        True  # heads that differ by layer stay as they are
    )
    for name, value in FEW.items():
        if type(now := getattr(config, name, None)) is int:
            setattr(config, name, min(now, value))
    _cut_depth(config)
    if (getattr(config, "pad_token_id", None) or 0) >= config.vocab_size:
        config.pad_token_id = 0
    return config


def _cut_depth(config: PretrainedConfig):
    """Keep few layers, each kind among them, and of lists with a value for each layer as many."""
    whole = config.num_hidden_layers
    lists = {
        name: values
        for name, values in vars(config).items()
        if isinstance(values, list) and len(values) == whole
    }
    kinds = [values for values in lists.values() if isinstance(values[0], str)]
    depth = max(min(whole, 3), *(of.index(kind) + 1 for of in kinds for kind in of), 1)
    if shared := getattr(
        config, "num_kv_shared_layers", 0
    ):  # the last ones, after those they share with
        own, depth = depth, min(2 * depth, whole)
        config.num_kv_shared_layers = min(shared, depth - own)
    if (pairs := getattr(config, "num_layers", whole)) not in (None, whole):  # of two layers each
        depth = 2 * (whole // pairs)
        config.num_layers = 2
    for name, values in lists.items():
        setattr(config, name, values[:depth])
    config.num_hidden_layers = depth


def _rows_are_apart(model: nn.Module) -> bool:
    """Whether two rows in one line have the logits that each has by itself."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 64, (1, n), generator=generator) for n in ROWS]
    with torch.no_grad():
        apart = torch.cat([logits(model, row, (row.shape[1],)) for row in rows], 1)
        together = logits(model, torch.cat(rows, 1), ROWS)
    return bool((together - apart).abs().max() <= TOLERANCE * apart.abs().max())


def logits(model: nn.Module, ids: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Of a line of rows of these lengths, told where they begin as `collate_packed` tells it."""
    ends = torch.tensor((0, *lengths)).cumsum(0, dtype=torch.int32)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return model(
        ids,
        position_ids=positions,
        cu_seq_lens_q=ends,
        cu_seq_lens_k=ends,
        max_length_q=max(lengths),
        max_length_k=max(lengths),
        use_cache=False,
    ).logits


def _give_masks(model: nn.Module):
    """Let a model's decoder be given the masks that transformers makes of positions."""
    decoder = model.get_decoder()
    decoder.register_forward_pre_hook(
        partial(_with_masks, model.config.get_text_config()), with_kwargs=True
    )


def _with_masks(config: PretrainedConfig, decoder: nn.Module, args: tuple, kwargs: dict):
    """The decoder's arguments with a mask for each kind of layer, where rows are packed."""
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None:
        return args, kwargs
    dtype = decoder.get_input_embeddings().weight.dtype
    masks = masks_of_rows(config, positions.shape, dtype, positions.device, positions)
    return args, kwargs | dict(attention_mask=masks)


def _attention_by_borders(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask=None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Causal attention of each row by itself, (B, T, H, D), of query (B, H, T, D) and K heads.

    Of all tokens as one row if the model's code does not pass on where rows begin.
    """
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.tensor([0, query.shape[2]])
    groups, out = query.shape[1] // key.shape[1], []
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    for start, stop in zip(cu_seq_lens_q[:-1].tolist(), cu_seq_lens_q[1:].tolist(), strict=True):
        seen = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        if sliding_window:
            seen = seen.triu(1 - sliding_window)
        q, k, v = (t[:, :, start:stop] for t in (query, key, value))
        out.append(nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scaling))
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(_BY_BORDERS, _attention_by_borders)
