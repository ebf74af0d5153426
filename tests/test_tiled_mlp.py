"""An MLP in tiles of tokens: the same gradients, one tile's tensors at a time, and no product more."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from fsdp_qlora.adapters import apply_adapters, lora_config, trainable_parameters
from fsdp_qlora.memory.checkpointing_policy import apply_activation_policy
from fsdp_qlora.memory.tiled_mlp import apply_tiled_mlp, tiled_mlps
from fsdp_qlora.model.blocks import decoder_blocks
from fsdp_qlora.model.conv1d import apply_plain_linears

from .families import family_config
from .test_checkpointing_policy import calls, loss_and_gradients, tiny_model
from .tiny import padded_batch, save_tiny, tiny_rows

torch.set_num_threads(1)  # threads that share a tiny product only wait for each other

LAYERS, TILES = 3, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("llama"), num_hidden_layers=LAYERS)


def tiled_model(
    folder, train_type="qlora", policy="recompute_all", reentrant=False, dropout=0.0, tiles=TILES
):
    model = apply_tiled_mlp(
        tiny_model(folder, train_type, dropout=dropout), tiles, [policy] * LAYERS
    )
    return apply_activation_policy(model, policy, reentrant)


def assert_same(tiled, whole, within=1e-4):
    """Equal losses and gradients of two models, but for the order of sums."""
    (found, gradients), (loss, expected) = (loss_and_gradients(m) for m in (tiled, whole))
    assert found.item() == pytest.approx(loss.item(), rel=within)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).abs().max() <= within * gradient.abs().max(), name


@pytest.mark.parametrize("train_type", ["full", "lora", "qlora", "bnb_dora"])
@pytest.mark.parametrize(
    "policy, reentrant",
    [("recompute_all", False), ("recompute_all", True), ("keep_attention", False)],
)
@pytest.mark.parametrize("tiles", [TILES, 10_000])
def test_gradients_are_those_of_a_whole_mlp(folder, train_type, policy, reentrant, tiles):
    model = tiled_model(folder, train_type, policy, reentrant, tiles=tiles)
    assert len(tiled_mlps(model)) == LAYERS
    whole = tiny_model(folder, train_type)
    if train_type in ("lora", "full"):
        assert_same(model.double(), whole.double(), 1e-7)
    else:
        assert_same(model, whole)  # 4-bit weights give no fp64


def family_model(family: str, tiles: int):
    """A tiny model of a family whose MLPs are adapted, in training mode without dropout."""
    torch.manual_seed(0)
    model = apply_plain_linears(
        AutoModelForCausalLM.from_config(
            family_config(family, use_cache=False), dtype=torch.float32
        )
    )
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
    model = apply_adapters(model, lora_config(rank=4))
    for name, p in trainable_parameters(model).items():
        torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(len(name)))
    return apply_tiled_mlp(model.train(), tiles, ["recompute_all"] * 2)


@pytest.mark.parametrize("family", ["Qwen2", "Gemma 2", "Phi-3", "GPT-2", "OLMo 2"])
def test_every_familys_mlp_can_be_tiled(family):
    tiled = apply_activation_policy(family_model(family, TILES), "recompute_all")
    assert_same(tiled.double(), family_model(family, tiles=1).double(), 1e-7)


def test_experts_are_refused_by_name():
    with pytest.raises(ValueError, match="--mlp_tiles 4: MixtralDecoderLayer has no MLP"):
        family_model("Mixtral", TILES)


def test_blocks_that_keep_their_products_are_left_whole(folder):
    policies = ["keep_all", "recompute_all", "keep_linears"]
    model = apply_tiled_mlp(tiny_model(folder, "qlora"), TILES, policies)
    mlps = [block.mlp for block in decoder_blocks(model)]
    assert [hasattr(mlp, "tiled") for mlp in mlps] == [False, True, False]


class WidestTensor(TorchDispatchMode):
    """Values of the largest tensor of a width that an operation makes."""

    def __init__(self, width: int):
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor) and t.dim() > 1 and t.shape[-1] == self.width:
                self.rows = max(self.rows, t.numel() // self.width)
        return out


def rows_at_once(model, width: int) -> int:
    """The most tokens of which there is a tensor of the MLP's width; opaque ops are looked into."""
    seen = WidestTensor(width)
    for mlp in tiled_mlps(model):

        def watched(x, forward=mlp.forward):
            with seen:
                return forward(x)

        mlp.forward = watched
    with seen:
        loss_and_gradients(model)
    return seen.rows


def test_no_tensor_of_the_mlps_width_has_more_rows_than_a_tile(folder):
    tokens = padded_batch(tiny_rows(1, 3)[0])["input_ids"].numel()
    assert rows_at_once(tiled_model(folder, tiles=1), 128) == tokens
    assert rows_at_once(tiled_model(folder), 128) == -(-tokens // TILES)


def test_an_mlp_runs_once_in_the_forward_and_its_last_layer_only_there(folder, monkeypatch):
    """3 blocks of 4 adapted layers around the MLP, forward and again; in it 3 forward and 2 again."""
    from fsdp_qlora.adapters import lora_layer

    model, made, plain = tiled_model(folder), [], lora_layer.adapted_linear
    monkeypatch.setattr(lora_layer, "adapted_linear", lambda *a: made.append(1) or plain(*a))
    assert calls(model)["fsdp_qlora::tiled_mlp"] == LAYERS
    assert len(made) == LAYERS * (4 + 4 + TILES * (3 + 2))


def directional(model, size: float = 2e-6) -> tuple[float, float]:
    """The loss's change along a direction of all trained weights: by gradients, by differences."""
    weights = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(5)
    direction = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in weights]

    def loss(step: float) -> torch.Tensor:
        with torch.no_grad():
            for p, d in zip(weights, direction, strict=True):
                p.add_(d, alpha=step)
        torch.manual_seed(0)  # the same masks
        return model(**padded_batch(tiny_rows(1, 3)[0])).loss

    loss(0.0).backward()
    slope = sum((p.grad * d).sum() for p, d in zip(weights, direction, strict=True)).item()
    return slope, (loss(size) - loss(-2 * size)).item() / (2 * size)


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_drops_what_the_forward_dropped(folder, compiled):
    """Else its slope would be that of another function. Masks differ from one forward to the next."""
    model = tiled_model(folder, "lora", dropout=0.5).double()
    if compiled:
        torch._dynamo.reset()
        for block in decoder_blocks(model):
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)
    slope, difference = directional(model)
    assert slope == pytest.approx(difference, rel=0.01) and abs(slope) > 1
    losses = {model(**padded_batch(tiny_rows(1, 3)[0])).loss.item() for _ in range(3)}
    assert len(losses) == 3


def test_blocks_share_graphs_in_which_an_mlp_is_one_op(folder):
    """The first block has another graph, as its input takes no gradient; an MLP one per direction."""
    torch._dynamo.reset()
    outer, inner = (CompileCounterWithBackend("aot_eager") for _ in range(2))
    model = tiled_model(folder, tiles=3)
    for mlp in tiled_mlps(model):
        mlp.forward = torch.compile(mlp.forward, backend=inner, fullgraph=True)
    for block in decoder_blocks(model):
        block.forward = torch.compile(block.forward, backend=outer, fullgraph=True)
    assert_same(model, tiny_model(folder, "qlora"))
    assert (outer.frame_count, inner.frame_count) == (2, 2)
