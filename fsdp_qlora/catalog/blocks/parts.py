"""What blocks are made of, and the parts that most models share. Pure: no torch.

Letters: D hidden, H query heads, K key-value heads, hd head size, E experts. `c` is a config.json's fields.
"""

from __future__ import annotations

from dataclasses import dataclass

Sizes = tuple[tuple[str, tuple[int, int]], ...]  # (out, in) of linear layers by name

Lengths = tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """What mixes tokens: attention, or a layer that carries a state along a row."""

    linears: Sizes  # the last gives its output
    biases: Lengths = ()
    beside: Lengths = ()  # weights that are in no linear layer: convolutions, norms, sinks
    heads: int = 0  # of attention; 0 where there is none
    kv_heads: int = 0
    head_dim: int = 0
    in_16_bits: tuple[str, ...] = ()  # layers that are never quantized: the model's code reads them
    state: int = 0  # values of the state that every token updates and reads
    state_heads: int = 0
    rule: str = ""  # by which it does: "delta", "mamba2" or "lightning"
    chunk: int = 0  # tokens that transformers' plain torch takes at once
    decays_by_channel: bool = False  # of a head's keys, not by head


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """What follows: gate, up and down, experts, or both."""

    linears: Sizes = ()  # the last gives its output
    width: int = 0  # values between up and down that a token passes through
    experts: int = 0
    experts_per_token: int = 0
    of_experts: Sizes = ()  # of one
    biases: Lengths = ()
    beside: Lengths = ()
    router_is_linear: bool = False  # and so one of `linears`

    @property
    def each_width(self) -> int:
        """The width of one expert, or of an MLP without any."""
        return self.of_experts[-1][1][1] if self.of_experts else self.width


@dataclass(frozen=True)
class LayerInputs:
    """What Gemma 3n and 4 give each block beside the stream: an embedding of its own, and more streams."""

    vocab: int
    width: int  # of one block's; 0 for none
    streams: int = 1  # of width D (AltUp, arXiv:2301.13310)

    def linears(self, layers: int, hidden: int) -> Sizes:
        """(out, in) of linear layers beside the blocks."""
        ends = ("altup_projections", "altup_unembed_projections")
        return (
            *((("per_layer_model_projection", (layers * self.width, hidden)),) * bool(self.width)),
            *((f"{end}.{i}", (hidden, hidden)) for end in ends for i in range(self.streams - 1)),
        )

    def tables(self, layers: int) -> Sizes:
        """Rows and width of an embedding for all blocks, and of the norm of what is added to it."""
        if not self.width:
            return ()
        return (
            ("embed_tokens_per_layer", (self.vocab, layers * self.width)),
            ("per_layer_projection_norm", (self.width, 1)),
        )


@dataclass(frozen=True)
class Block:
    """One kind of block."""

    mixer: Mixer
    mlp: Mlp
    norms: Lengths


LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")


def attention(
    c: dict,
    *,
    head_dim: int = 0,
    q_times: int = 1,  # 2 where q_proj gives a gate too
    out: str = "o_proj",
    qk_norm: tuple[str, ...] = (),
    bias: bool | None = None,
    out_bias: bool | None = None,  # as the others, unless given
    norm_of_width: bool = False,  # a weight for each value of q and k, not of one head
    sinks: bool = False,
) -> Mixer:
    heads, d = c["num_attention_heads"], c["hidden_size"]
    kv_heads = c.get("num_key_value_heads") or heads
    size = head_dim or c.get("head_dim") or d // heads
    q, kv = heads * size, kv_heads * size
    linears = (
        ("q_proj", (q_times * q, d)),
        ("k_proj", (kv, d)),
        ("v_proj", (kv, d)),
        (out, (d, q)),
    )
    biased = c.get("attention_bias", False) if bias is None else bias
    of_out = biased if out_bias is None else out_bias
    widths = (q, kv) if norm_of_width else (size, size)
    return Mixer(
        linears=linears,
        biases=tuple(
            (name, rows) for name, (rows, _) in linears if (of_out if name == out else biased)
        ),
        beside=(*zip(qk_norm, widths, strict=False), *((("sinks", heads),) if sinks else ())),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
    )


def _gated(width: int, d: int, prefix: str = "", names=("gate_proj", "up_proj", "down_proj")):
    """Sizes of an MLP with a gate."""
    gate, up, down = (prefix + name for name in names)
    return ((gate, (width, d)), (up, (width, d)), (down, (d, width)))


def dense(c: dict, width: int = 0, **more) -> Mlp:
    width = width or c["intermediate_size"]
    return Mlp(linears=_gated(width, c["hidden_size"], **more), width=width)


def ungated(width: int, d: int, prefix: str = "") -> Mlp:
    """An MLP of two layers."""
    sizes = ((prefix + "up_proj", (width, d)), (prefix + "down_proj", (d, width)))
    return Mlp(linears=sizes, width=width)


def experts(
    c: dict,
    count: int,
    per_token: int,
    width: int,
    *,
    shared: int = 0,  # width of the experts that every token passes through
    prefix: str = "shared_expert.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    biases: bool = False,
    beside: Lengths = (),
) -> Mlp:
    d = c["hidden_size"]
    if biases:
        beside = (*beside, ("gate_up_proj_bias", 2 * width * count), ("down_proj_bias", d * count))
    return Mlp(
        linears=_gated(shared, d, prefix, names) if shared else (),
        width=per_token * width + shared,
        experts=count,
        experts_per_token=per_token,
        of_experts=(
            ("experts.gate_up_proj", (2 * width, d)),
            ("experts.down_proj", (d, width)),
        ),
        beside=beside,
    )


def norms(c: dict, *names: str) -> Lengths:
    return tuple((name, c["hidden_size"]) for name in names or LLAMA_NORMS)
