"""The MLP of a block in tiles of tokens: no intermediate of all tokens at once, forward or backward.

A gated MLP makes three tensors of (N, F), 3.5 times as wide as the hidden states in Llama 3.1 8B, and
as much again in its backward; over long rows nothing else of a recomputed block is as large. Each
token's MLP is its own, so it can be taken for N / tiles tokens at a time. Backward makes one tile's
tensors again and goes through them before the next, and sums the gradients of weights in fp32. What a
tile costs is that every weight is dequantized for it once more in each pass.

Published as TiledMLP: Arctic Long Sequence Training, arXiv:2506.13996, and in Liger kernels. Those
run the MLP in the forward, in the block's recomputation and once more in its backward; this one saves
its input before it runs, so that a recomputed block stops there, as at its last linear layer
(docs/LOG.md says what else kept theirs out).

Shapes: N tokens of all rows, D hidden, F intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..adapters.lora_layer import LoraLinear
from ..choices import POLICIES
from ..model.blocks import base_model, decoder_blocks, has_experts, mlp_of
from ..model.opaque_ops import outside_of_op
from ..own_forward import compute_by


class _TiledMlp:
    """How one MLP is computed: its own forward, in how many tiles, and what it trains."""

    known: WeakValueDictionary[int, _TiledMlp] = WeakValueDictionary()

    def __init__(self, mlp: nn.Module, tiles: int, width: int, dtype: torch.dtype):
        self.forward, self.tiles = mlp.forward, tiles
        # Looked up in each call: FSDP puts other parameters in their place.
        self.trained = [
            (module, name)
            for module in mlp.modules()
            for name, p in module._parameters.items()
            if p is not None and p.requires_grad
        ]
        self.drops = [m for m in mlp.modules() if isinstance(m, nn.Dropout) and m.p]
        self.last = _last_layer(mlp, width, dtype)
        # A tensor, for it goes through graphs that all blocks share.
        self.handle = torch.tensor(id(self), device="cpu")
        self.seed = torch.zeros((), dtype=torch.int64, device="cpu")
        self.known[id(self)] = self

    def weights(self) -> list[Tensor]:
        """The trained weights."""
        return [getattr(module, name) for module, name in self.trained]

    def draw_seed(self) -> Tensor:
        """What a call's dropout masks are made from: the same where a block is recomputed.

        Eager checkpointing gives the generator back its state. A graph takes what the model's forward
        drew before (`apply_tiled_mlp`) and keeps it for its backward.
        """
        if not any(m.training for m in self.drops):
            return self.handle
        return self.seed if torch.compiler.is_compiling() else _new_seed()

    def parts(self, x: Tensor) -> Iterator[slice]:
        """The tokens of each tile."""
        size = max(1, -(-len(x) // self.tiles))
        return (slice(start, start + size) for start in range(0, len(x), size))


def apply_tiled_mlp(model: nn.Module, tiles: int, policies: list[str]) -> nn.Module:
    """Compute the MLPs of recomputed blocks in `tiles` tiles of tokens, in place.

    `policies` are the blocks' activation policies, which come after it: a block that keeps its
    products is left whole. Raises ValueError, naming --mlp_tiles, for blocks without an MLP to tile.
    """
    if tiles == 1:
        return model
    causal, dtype = base_model(model), model.get_input_embeddings().weight.dtype
    width = causal.config.get_text_config().hidden_size
    check_mlps(model, tiles)
    for block, policy in zip(decoder_blocks(model), policies, strict=True):
        mlp = mlp_of(block)
        if not POLICIES[policy].reruns_mlp:
            continue
        mlp.tiled = _TiledMlp(mlp, tiles, width, dtype)
        compute_by(mlp, _computed_in_tiles)
    if any(mlp.drops for mlp in tiled_mlps(model)):
        causal.register_forward_pre_hook(lambda *_: _draw_seeds(model))
    return model


def check_mlps(model: nn.Module, tiles: int):
    """Refuse to tile blocks without an MLP that can be."""
    for block in decoder_blocks(model) if tiles > 1 else ():
        if mlp_of(block) is None or has_experts(block):
            raise ValueError(
                f"--mlp_tiles {tiles}: {type(block).__name__} has no MLP module that "
                "treats each token alone; leave it out"
            )


def tiled_mlps(model: nn.Module) -> list[_TiledMlp]:
    """The tiled MLPs of a model."""
    found = (getattr(m, "tiled", None) for m in model.modules())
    return [mlp for mlp in found if isinstance(mlp, _TiledMlp)]


def _draw_seeds(model: nn.Module):
    """New dropout masks for the next forward; tensors anew, since a graph may hold the old ones."""
    for mlp in tiled_mlps(model):
        mlp.seed = _new_seed()


def _new_seed() -> Tensor:
    return torch.randint(2**62, (), device="cpu")


@torch.no_grad()
def _last_layer(mlp: nn.Module, width: int, dtype: torch.dtype) -> LoraLinear | None:
    """The adapted layer whose output is the MLP's, found by running its shapes on one token.

    Not with DoRA, whose magnitude needs that output in backward.
    """
    layers = [m for m in mlp.modules() if isinstance(m, LoraLinear) and not m.lora_magnitude_vector]
    seen: list[tuple[LoraLinear, Tensor]] = []
    hooks = [m.register_forward_hook(lambda m, _, y: seen.append((m, y))) for m in layers]
    try:
        with FakeTensorMode():
            shapes = {
                name: torch.empty(p.shape, dtype=p.dtype) for name, p in mlp.named_parameters()
            }
            out = torch.func.functional_call(mlp, shapes, torch.empty(1, 1, width, dtype=dtype))
    finally:
        for hook in hooks:
            hook.remove()
    return next((layer for layer, y in seen if y is out), None)


def _computed_in_tiles(module: nn.Module, own, x: Tensor) -> Tensor:
    """The MLP of x (B, T, D), in tiles."""
    mlp, kind = module.tiled, x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    seed = mlp.draw_seed()
    token = _tiled_mlp_inputs(x, mlp.weights(), mlp.handle, seed, dtype)
    return tiled_mlp(token, x.detach(), mlp.handle, seed, dtype)


# ---- two opaque ops, as for an adapted layer (adapters/lora_ops.py) ----------------------------


@torch.library.custom_op("fsdp_qlora::tiled_mlp_inputs", mutates_args=())
def _tiled_mlp_inputs(
    x: Tensor, weights: Sequence[Tensor], handle: Tensor, seed: Tensor, autocast: torch.dtype | None
) -> Tensor:
    """A token (B, T, D) that takes no memory and carries the gradient of the output to x and weights."""
    return x.new_zeros(1, dtype=autocast or x.dtype).expand(x.shape)


@torch.library.custom_op("fsdp_qlora::tiled_mlp", mutates_args=())
def tiled_mlp(
    token: Tensor, x: Tensor, handle: Tensor, seed: Tensor, autocast: torch.dtype | None
) -> Tensor:
    """The MLP of x (B, T, D), a tile at a time."""
    mlp, rows = _TiledMlp.known[handle.item()], x.reshape(-1, x.shape[-1])
    y = x.new_empty(x.shape, dtype=token.dtype)
    y_rows = y.view(rows.shape)
    with outside_of_op(), torch.no_grad(), _in_tiles(mlp, x.device, seed, autocast):
        for part in mlp.parts(rows):
            y_rows[part] = mlp.forward(rows[part][None])[0]
    return y


@torch.library.custom_op("fsdp_qlora::tiled_mlp_backward", mutates_args=())
def _tiled_mlp_backward(
    dy: Tensor,
    x: Tensor,
    weights: Sequence[Tensor],
    handle: Tensor,
    seed: Tensor,
    autocast: torch.dtype | None,
) -> list[Tensor]:
    """dX (B, T, D) and the gradient of each weight, summed over tiles in fp32 or wider."""
    mlp, rows = _TiledMlp.known[handle.item()], x.reshape(-1, x.shape[-1])
    dx, dy_rows = x.new_empty(x.shape), dy.reshape(rows.shape)
    dx_rows = dx.view(rows.shape)
    totals = [
        torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32)) for w in weights
    ]
    with (
        outside_of_op(),
        torch.enable_grad(),
        _in_tiles(mlp, x.device, seed, autocast),
        only_gradients(mlp.last),
    ):
        for part in mlp.parts(rows):
            tile = rows[part][None].detach().requires_grad_()
            d_tile, *found = torch.autograd.grad(
                mlp.forward(tile), [tile, *mlp.weights()], dy_rows[part][None]
            )
            dx_rows[part] = d_tile[0]
            for total, gradient in zip(totals, found, strict=True):
                total += gradient
    return [dx, *(t.to(w.dtype) for t, w in zip(totals, weights, strict=True))]


@contextmanager
def _in_tiles(mlp: _TiledMlp, device: torch.device, seed: Tensor, autocast: torch.dtype | None):
    """Forward and backward of the tiles draw the same dropout masks, under the same autocast."""
    devices = [device] if device.type == "cuda" else []
    drops = any(m.training for m in mlp.drops)
    with (
        torch.random.fork_rng(devices) if drops else nullcontext(),
        torch.autocast(device.type, autocast, enabled=autocast is not None),
    ):
        if drops:
            torch.default_generator.manual_seed(seed.item())
            if devices:
                torch.cuda.manual_seed(seed.item())
        yield


@contextmanager
def only_gradients(layer: LoraLinear | None):
    """Leave out the layer's product, whose output no backward needs."""
    if layer is not None:
        layer.only_gradients = True
    try:
        yield
    finally:
        if layer is not None:
            del layer.only_gradients  # as it was: compiled code looks for it


@_tiled_mlp_inputs.register_fake
def _(x, weights, handle, seed, autocast):
    return x.new_empty(1, dtype=autocast or x.dtype).expand(x.shape)


@tiled_mlp.register_fake
def _(token, x, handle, seed, autocast):
    return x.new_empty(x.shape, dtype=token.dtype)


@_tiled_mlp_backward.register_fake
def _(dy, x, weights, handle, seed, autocast):
    return [x.new_empty(x.shape), *(w.new_empty(w.shape) for w in weights)]


def _save_inputs(ctx, inputs, output):
    x, weights, handle, seed, ctx.autocast = inputs
    ctx.save_for_backward(x, handle, seed, *weights)


def _inputs_backward(ctx, dy):
    x, handle, seed, *weights = ctx.saved_tensors
    dx, *gradients = _tiled_mlp_backward(dy, x, weights, handle, seed, ctx.autocast)
    return dx, gradients, None, None, None


def _token_backward(ctx, dy):
    return dy, *[None] * 4


_tiled_mlp_inputs.register_autograd(_inputs_backward, setup_context=_save_inputs)
tiled_mlp.register_autograd(_token_backward)
