"""Blocks of models that are not built like Llama's: mixers beside attention, experts of every build.

A model of several kinds of blocks, such as a hybrid, has one `Block` for each kind, with how many of them
there are. Everything is read from config.json's fields. Pure: no torch.

Letters: D hidden, H query heads, K key-value heads, hd head size, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

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
    state: int = 0  # values of the state that every token updates and reads
    state_heads: int = 0


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

    @property
    def each_width(self) -> int:
        """The width of one expert, or of an MLP without any."""
        return self.of_experts[-1][1][1] if self.of_experts else self.width


@dataclass(frozen=True)
class Block:
    """One kind of block."""

    mixer: Mixer
    mlp: Mlp
    norms: Lengths


def _attention(
    c: dict,
    *,
    head_dim: int = 0,
    q_times: int = 1,  # 2 where q_proj gives a gate too
    out: str = "o_proj",
    qk_norm: tuple[str, ...] = (),
    bias: bool | None = None,
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
    return Mixer(
        linears=linears,
        biases=tuple((name, rows) for name, (rows, _) in linears) if biased else (),
        beside=(*((name, size) for name in qk_norm), *((("sinks", heads),) if sinks else ())),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size,
    )


def _gated(width: int, d: int, prefix: str = "", names=("gate_proj", "up_proj", "down_proj")):
    """Sizes of an MLP with a gate."""
    gate, up, down = (prefix + name for name in names)
    return ((gate, (width, d)), (up, (width, d)), (down, (d, width)))


def _dense(c: dict, width: int = 0, **more) -> Mlp:
    width = width or c["intermediate_size"]
    return Mlp(linears=_gated(width, c["hidden_size"], **more), width=width)


def _experts(
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


def _norms(c: dict, *names: str) -> Lengths:
    return tuple((name, c["hidden_size"]) for name in names or _LLAMA_NORMS)


_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")


def _delta_net(c: dict, fused: bool) -> Mixer:
    """Gated delta net (arXiv:2412.06464): as Qwen3-Next's code has it (`fused`), or Qwen3.5's."""
    d, heads = c["hidden_size"], c["linear_num_value_heads"]
    size = c["linear_value_head_dim"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], heads * size
    joined = (("in_proj_qkvz", (2 * (keys + values), d)), ("in_proj_ba", (2 * heads, d)))
    apart = (
        ("in_proj_qkv", (2 * keys + values, d)),
        ("in_proj_z", (values, d)),
        ("in_proj_b", (heads, d)),
        ("in_proj_a", (heads, d)),
    )
    conv = c.get("linear_conv_kernel_dim", 4) * (2 * keys + values)
    return Mixer(
        linears=(*(joined if fused else apart), ("out_proj", (d, values))),
        beside=(("conv1d", conv), ("dt_bias", heads), ("A_log", heads), ("norm", size)),
        state=heads * size * c["linear_key_head_dim"],
        state_heads=heads,
    )


def _qwen_hybrid(c: dict, layer: int) -> Block:
    """Qwen3-Next and Qwen3.5: three gated delta nets, then gated attention."""
    kind, fused = c["layer_types"][layer], c["model_type"] == "qwen3_next"
    attends = kind == "full_attention"
    mixer = (
        _attention(c, q_times=2, qk_norm=("q_norm", "k_norm")) if attends else _delta_net(c, fused)
    )
    experts = c.get("num_experts") and layer not in (c.get("mlp_only_layers") or ())
    if not experts or (layer + 1) % (c.get("decoder_sparse_step") or 1):
        return Block(mixer, _dense(c), _norms(c))
    mlp = _experts(
        c,
        c["num_experts"],
        c["num_experts_per_tok"],
        c["moe_intermediate_size"],
        shared=c["shared_expert_intermediate_size"],
    )
    gate = (("shared_expert_gate", (1, c["hidden_size"])),)
    return Block(mixer, replace(mlp, linears=gate + mlp.linears), _norms(c))


def _gpt_oss(c: dict, layer: int) -> Block:
    experts = c["num_local_experts"]
    mlp = _experts(
        c,
        experts,
        c["num_experts_per_tok"],
        c["intermediate_size"],
        biases=True,
        beside=(("router.bias", experts),),
    )
    return Block(_attention(c, bias=c.get("attention_bias", True), sinks=True), mlp, _norms(c))


# Each model_type's block of a number.
_BUILDERS: dict[str, Callable[[dict, int], Block]] = {
    "gpt_oss": _gpt_oss,
    "qwen3_5_text": _qwen_hybrid,
    "qwen3_5_moe_text": _qwen_hybrid,
    "qwen3_next": _qwen_hybrid,
}
# Layers that `all-linear` leaves out, by the last part of their names (adapters/lora.py, `left_out`).
_LEFT_OUT = {
    "qwen3_next": ("gate_proj", "up_proj", "down_proj"),
}


def layer_blocks(config: dict) -> list[Block]:
    """Each block of the model that a config.json describes, in order.

    Empty for a type whose blocks are all alike and built like Llama's (families.py).
    """
    build = _BUILDERS.get(config.get("model_type", ""))
    return [build(config, layer) for layer in range(config["num_hidden_layers"])] if build else []


def left_out(family: str) -> tuple[str, ...]:
    """Last parts of the names of layers that `all-linear` leaves out of a model_type."""
    return _LEFT_OUT.get(family, ())


def outer_weights(config: dict) -> tuple[tuple[str, int, int], ...]:
    """Name, rows and width of weights beside the blocks, the last norm and the vocabulary."""
    return ()
