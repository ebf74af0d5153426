"""Shapes of decoder models: what is in a block, and how many weights of each kind there are.

Memory and time follow from a model's shape alone, so estimates need its config.json and no weights
(`shapes.py`). Pure: no torch.

Letters: V vocabulary, D hidden, I intermediate, H query heads, K key-value heads, hd head size,
R LoRA rank, O out rows of a linear layer, E experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from .blocks import Block, LayerInputs, Sizes, left_out
from .families import DEFAULT_TARGETS, FAMILIES, LLAMA, Traits


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of one decoder model."""

    name: str
    family: str  # transformers' model_type
    vocab: int  # V
    hidden: int  # D
    intermediate: int  # I
    layers: int
    heads: int  # H
    kv_heads: int  # K
    head_dim: int  # hd
    traits: Traits = LLAMA  # of the family and this model of it
    max_positions: int | None = None
    experts: int = 0  # E
    experts_per_token: int = 0
    new_blocks: int = 0  # among the layers: Llama-Pro's, trained (llama_pro.py)
    # Where blocks differ, or are not built like Llama's: a shape for each kind, as if all blocks were of
    # it, with `block`; and the kind of each block, in order.
    kinds: tuple[ModelShape, ...] = ()
    order: tuple[int, ...] = ()
    block: Block | None = None
    inputs: LayerInputs | None = None  # of each block, beside the stream

    @property
    def tied(self) -> bool:
        """True if one tensor is embedding and head."""
        return self.traits.tied

    @property
    def known_family(self) -> bool:
        """False if the block is only assumed to be built like Llama's."""
        return self.family in FAMILIES or bool(self.kinds)

    @property
    def mlp_width(self) -> int:
        """Values between up and down that a token passes through; of all its experts."""
        if self.block:
            return self.block.mlp.width
        return self.intermediate * max(1, self.experts_per_token)

    @property
    def norms(self) -> int:
        """Norms of width D in a block."""
        return len(self.block.norms) if self.block else self.traits.norms

    @property
    def in_16_bits(self) -> tuple[str, ...]:
        """Names of a block's linear layers that are never quantized."""
        return self.block.mixer.in_16_bits if self.block else ()

    @property
    def has_state(self) -> bool:
        """Whether some mixers carry a state along a row."""
        return any(kind.state_width for kind, _ in self.block_kinds())

    @property
    def state_width(self) -> int:
        """Values of a token that a mixer with a state convolves, and takes in: 0 without one."""
        mixer = self.block.mixer if self.block else None
        return sum(out for _, (out, _) in mixer.linears[:-1]) if mixer and mixer.state else 0

    @property
    def learned_positions(self) -> int:
        """Rows of an embedding of positions, which most families do without."""
        return (self.max_positions or 0) if self.traits.layers == "gpt2" else 0

    def attention_linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the linear layers of a block's attention; the last gives its output."""
        if self.block:
            return dict(self.block.mixer.linears)
        q, kv, d = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        if self.traits.layers == "gpt2":
            return {"attn.c_attn": (q + 2 * kv, d), "attn.c_proj": (d, q)}
        if self.traits.layers == "fused":
            return dict(qkv_proj=(q + 2 * kv, d), o_proj=(d, q))
        return dict(q_proj=(q, d), k_proj=(kv, d), v_proj=(kv, d), o_proj=(d, q))

    def mlp_linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the linear layers of a block's MLP; the last gives its output."""
        d, i = self.hidden, self.intermediate
        if self.block:
            return dict(self.block.mlp.linears)
        if self.traits.experts:
            return {}
        if self.traits.layers == "gpt2":
            return {"mlp.c_fc": (i, d), "mlp.c_proj": (d, i)}
        if self.traits.layers == "fused":
            return dict(gate_up_proj=(2 * i, d), down_proj=(d, i))
        return dict(gate_proj=(i, d), up_proj=(i, d), down_proj=(d, i))

    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every linear layer of a block, by name, in the order of the forward.

        Of a model of several kinds of blocks, those of all kinds: for names, not for counting.
        """
        if self.kinds:
            return {name: size for kind in self.kinds for name, size in kind.linears().items()}
        return self.attention_linears() | self.mlp_linears()

    def expert_linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the weights of one expert; empty without experts."""
        if self.kinds:
            return next((k.expert_linears() for k in self.kinds if k.experts), {})
        if self.block:
            return dict(self.block.mlp.of_experts)
        if not self.traits.experts:
            return {}
        return {
            "experts.gate_up_proj": (2 * self.intermediate, self.hidden),
            "experts.down_proj": (self.hidden, self.intermediate),
        }

    def biases(self) -> dict[str, int]:
        """Length of the bias of each linear layer of a block that has one."""
        if self.block:
            return dict(self.block.mixer.biases + self.block.mlp.biases)
        attention = list(self.attention_linears())
        has = {name: self.traits.mlp_bias for name in self.mlp_linears()}
        has |= dict.fromkeys(attention[:-1], self.traits.qkv_bias) | {
            attention[-1]: self.traits.o_bias
        }
        return {name: out for name, (out, _) in self.linears().items() if has[name]}

    def norm_weights(self) -> list[tuple[str, int]]:
        """Name and length of each weight of a block's norms, and of others that are in no linear layer."""
        if self.block:
            return [*self.block.norms, *self.block.mixer.beside, *self.block.mlp.beside]
        widths = dict(
            head=(self.head_dim, self.head_dim),
            width=(self.heads * self.head_dim, self.kv_heads * self.head_dim),
        )
        of_qk = zip(("q_norm", "k_norm"), widths.get(self.traits.qk_norm, ()), strict=False)
        names = self.traits.norm_names * self.traits.norm_parts
        return [*((name, self.hidden) for name in names), *of_qk]

    def block_params(self) -> dict[str, int]:
        """Weights of one block: `linears`, and `norms` with biases and a router."""
        each = sum(out * wide for out, wide in self.linears().values())
        experts = sum(out * wide for out, wide in self.expert_linears().values())
        norms = sum(width for _, width in self.norm_weights()) + sum(self.biases().values())
        return dict(linears=each + self.experts * experts, norms=norms + self.router_weights)

    @property
    def router_weights(self) -> int:
        """Weights of a block's router that are in no linear layer."""
        in_linear = self.block and self.block.mlp.router_is_linear
        return 0 if in_linear else self.experts * self.hidden

    def outer_linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of linear layers beside the blocks and the head."""
        return dict(self.inputs.linears(self.layers, self.hidden)) if self.inputs else {}

    def outer_tables(self) -> Sizes:
        """Rows and width of other weights beside the blocks, the last norm and the vocabulary."""
        return self.inputs.tables(self.layers) if self.inputs else ()

    def block_kinds(self) -> tuple[tuple[ModelShape, int], ...]:
        """The shape of each kind of block, with how many there are."""
        if not self.kinds:
            return ((self, self.layers),)
        return tuple(
            (self.kinds[kind], count) for kind, count in sorted(Counter(self.order).items())
        )

    def used_linears(self) -> int:
        """Weights of a block's linear layers that a token is multiplied with."""
        experts = sum(out * wide for out, wide in self.expert_linears().values())
        return (
            sum(out * wide for out, wide in self.linears().values())
            + self.experts_per_token * experts
        )

    def params(self) -> dict[str, int]:
        """Weights of the model by kind; `head` is 0 where the embedding is used again.

        `norms` are all that is neither linear nor the embedding or head; an embedding of each layer too.
        """
        embedding = self.vocab * self.hidden
        blocks = [(kind.block_params(), count) for kind, count in self.block_kinds()]
        last = self.hidden * (self.traits.norm_parts + self.learned_positions)
        last += sum(rows * width for _, (rows, width) in self.outer_tables())
        outer = sum(out * wide for out, wide in self.outer_linears().values())
        return dict(
            embedding=embedding,
            linears=outer + sum(count * block["linears"] for block, count in blocks),
            norms=sum(count * block["norms"] for block, count in blocks) + last,
            head=0 if self.tied else embedding,
        )

    def total_params(self) -> int:
        """Weights of the model, as `sum(p.numel() for p in model.parameters())`."""
        return sum(self.params().values())

    def targets(self, wanted: str | list[str] | None = "all-linear") -> tuple[str, ...]:
        """Names of the adapted linear layers of a block, and lm_head if it is adapted.

        `wanted` is what PEFT takes: "all-linear", names, or None for PEFT's choice. Raises
        ValueError, listing the names there are, for one that does not exist.
        """
        names = (*self.linears(), *self.outer_linears())
        if wanted == "all-linear":
            return tuple(n for n in names if n.rsplit(".", 1)[-1] not in left_out(self.family))
        if wanted is None:
            wanted = [*DEFAULT_TARGETS.get(self.family, ())] or ["q_proj", "v_proj"]
        known = (*names, "lm_head")
        wanted = [wanted] if isinstance(wanted, str) else wanted

        def is_of(name, asked):
            return f".{name}".endswith(f".{asked.rsplit('.', 1)[-1]}")

        # What one kind of block lacks, another has.
        missing = [w for w in wanted if not any(is_of(name, w) for name in known)]
        if missing and not self.block:
            raise ValueError(
                f"--lora_target_modules {','.join(missing)}: no such module; "
                f"{self.name} has {', '.join(known)}"
            )
        return tuple(name for name in known if any(is_of(name, w) for w in wanted))

    def expert_targets(self, wanted: Iterable[str]) -> tuple[str, ...]:
        """Names of the adapted weights of experts; "experts" is all of them.

        Raises ValueError, listing the names there are, for one that does not exist.
        """
        names, wanted = tuple(self.expert_linears()), tuple(wanted)

        def is_of(name, asked):
            return asked in ("experts", name) or name.endswith(asked.split(".")[-1])

        missing = [w for w in wanted if not any(is_of(name, w) for name in names)]
        if missing and not self.block:
            raise ValueError(
                f"--lora_target_parameters {','.join(missing)}: no such parameter; "
                f"{self.name} has {', '.join(names) or 'no experts'}"
            )
        return tuple(name for name in names if any(is_of(name, w) for w in wanted))

    def lora_block_params(self, rank: int, targets: tuple[str, ...]) -> int:
        """Adapter weights of one block: A (R, in) and B (out, R) for each target."""
        return rank * sum(sum(shape) for name, shape in self.linears().items() if name in targets)

    def lora_params(self, rank: int = 64, targets: str | list[str] | None = "all-linear") -> int:
        """Adapter weights of the model."""
        names = self.targets(targets)
        head = rank * (self.vocab + self.hidden) if "lm_head" in names else 0
        outer = rank * sum(sum(s) for name, s in self.outer_linears().items() if name in names)
        return (
            head
            + outer
            + sum(count * kind.lora_block_params(rank, names) for kind, count in self.block_kinds())
        )

    def cut(self, layers: int) -> ModelShape:
        """The same model with fewer blocks, the first ones."""
        name = f"{self.name} ({layers} of {self.layers} layers)"
        return replace(self, name=name, layers=layers, order=self.order[:layers])
