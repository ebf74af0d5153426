"""Tiny checkpoints in the formats that makers publish, made by the formats' own code where it runs here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

GROUP = 32


def in_format(folder: str | Path, kind: str) -> dict[str, Tensor]:
    """Store a model's linear weights in a format, in place; what each stands for, by its name.

    That comes from the format's library, or from its definition where there is none for the CPU.
    """
    make, quantization = MADE[kind]
    tensors, numbers = load_file(Path(folder) / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        stored, numbers[name] = make(tensors.pop(name), generator)
        layer = name.removesuffix("weight")
        tensors |= {layer + end: t.contiguous() for end, t in stored.items()}
    save_file(tensors, Path(folder) / "model.safetensors", {"format": "pt"})
    declare(folder, quantization)
    return numbers


def declare(folder, quantization: dict):
    path = Path(folder) / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | dict(quantization_config=quantization))
    )


def fp8(block=None, scale_fmt=None):
    """transformers' own quantization."""
    settings = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    op = Fp8Quantize(SimpleNamespace(quantization_config=settings))

    def make(weight: Tensor, generator):
        stored = op.convert({"weight": weight})
        scale = stored["weight_scale_inv"].float()
        high, wide = (n // s for n, s in zip(weight.shape, scale.shape, strict=True))
        scale = scale.repeat_interleave(high, 0).repeat_interleave(wide, 1)
        numbers = stored["weight"].float() * scale
        if block is None:  # as Mistral has it
            stored["weight_scale_inv"] = stored["weight_scale_inv"].view(())
            stored["activation_scale"] = torch.tensor(0.5)
        return stored, numbers

    return make


def compressed(compressor, args: QuantizationArgs):
    """compressed-tensors' own packing, and its dequantization."""
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def make(weight: Tensor, generator):
        groups = weight.shape[1] // args.group_size if args.group_size else 1
        low, high = (f(weight.unflatten(1, (groups, -1)), -1) for f in (torch.amin, torch.amax))
        most = 448 if args.type == "float" else 2 ** (args.num_bits - 1) - 1
        given = dict(weight=weight)
        if args.symmetric:
            given["weight_scale"] = torch.maximum(-low, high) / most
        else:
            given["weight_scale"] = (high - low) / (2**args.num_bits - 1)
            zero = -(2 ** (args.num_bits - 1)) - (low / given["weight_scale"]).round()
            given["weight_zero_point"] = zero.to(torch.int8)
        if args.strategy == "tensor":
            given["weight_scale"] = given["weight_scale"].amax().view(1)
        stored = compressor.compress(given, scheme)
        return stored, compressor.decompress(stored, scheme)["weight"].float()

    return make


def declared(args: QuantizationArgs, form: str) -> dict:
    group = dict(targets=["Linear"], weights=json.loads(args.model_dump_json()))
    return dict(
        quant_method="compressed-tensors", format=form, config_groups=dict(group_0=group), ignore=[]
    )


def _words(values: Tensor, order=range(8)) -> Tensor:
    """int32 (N, M / 8) of integers (N, M) below 16."""
    parts = values.unflatten(1, (-1, 8)).long()[..., torch.tensor(order)]
    words = sum(parts[..., place] << (4 * place) for place in range(8))
    return (words - ((words >> 31) << 32)).int()


def _random_integers(weight: Tensor, generator) -> tuple[Tensor, Tensor, Tensor]:
    """q (I, O) and zeros (G, O) below 16, and scales (G, O)."""
    out, wide = weight.shape
    groups = wide // GROUP
    q = torch.randint(0, 16, (wide, out), generator=generator)
    zeros = torch.randint(1, 16, (groups, out), generator=generator)
    scales = (0.01 + 0.02 * torch.rand(groups, out, generator=generator)).half()
    return q, zeros, scales


def gptq(version: str, act_order: bool):
    """W = (q - zero) scale, by GPTQ's definition; the first version stores zero - 1."""

    def make(weight: Tensor, generator):
        q, zeros, scales = _random_integers(weight, generator)
        group = torch.arange(len(q)) // GROUP
        if act_order:
            group = group[torch.randperm(len(q), generator=generator)]
        stored = dict(
            qweight=_words(q.t()).t(),
            qzeros=_words(zeros - int(version == "gptq")),
            scales=scales,
            g_idx=group.int(),
        )
        return stored, ((q - zeros[group]) * scales.float()[group]).t()

    return make


def awq(weight: Tensor, generator):
    """AutoAWQ's layout, as compressed-tensors' own converter reads it."""
    q, zeros, scales = _random_integers(weight, generator)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = dict(qweight=_words(q, order), qzeros=_words(zeros, order), scales=scales)
    converter = AutoAWQConverter(group_size=GROUP, ignore=())
    theirs = converter.process({f"x.{end}": t.clone().contiguous() for end, t in stored.items()})
    scheme = next(iter(converter._build_quant_config().config_groups.values()))
    local = {key.removeprefix("x."): t for key, t in theirs.items()}
    local["weight_scale"] = local["weight_scale"].float()  # or it would round to half
    return stored, PackedQuantizationCompressor.decompress(local, scheme)["weight"].float()


def _int(bits: int, **more) -> QuantizationArgs:
    return QuantizationArgs(num_bits=bits, type="int", **more)


_INT4 = _int(4, strategy="group", group_size=GROUP, symmetric=True)
_INT4_ZEROS = _int(4, strategy="group", group_size=GROUP, symmetric=False)
_INT8 = _int(8, strategy="channel", symmetric=True)
_FLOAT = {
    s: QuantizationArgs(num_bits=8, type="float", strategy=s, symmetric=True)
    for s in ("channel", "tensor")
}
_BY_4 = dict(quant_method="gptq", bits=4, group_size=GROUP)
# Kind -> what makes a weight's tensors, and quantization_config.
MADE = {
    "fp8, blocks": (fp8([16, 16]), dict(quant_method="fp8", weight_block_size=[16, 16])),
    "fp8, blocks with exponents": (
        fp8([16, 32], "ue8m0"),
        dict(quant_method="fp8", weight_block_size=[16, 32], scale_fmt="ue8m0"),
    ),
    "fp8, a scale for all": (fp8(), dict(quant_method="fp8", activation_scheme="static")),
    **{
        f"compressed fp8, by {s}": (
            compressed(NaiveQuantizationCompressor, args),
            declared(args, "float-quantized"),
        )
        for s, args in _FLOAT.items()
    },
    **{
        f"compressed integers, {name}": (
            compressed(PackedQuantizationCompressor, args),
            declared(args, "pack-quantized"),
        )
        for name, args in (("4 bits", _INT4), ("zeros", _INT4_ZEROS), ("8 bits", _INT8))
    },
    "gptq": (gptq("gptq", False), _BY_4),
    "gptq, second format, act-order": (
        gptq("gptq_v2", True),
        _BY_4 | dict(checkpoint_format="gptq_v2", desc_act=True),
    ),
    "awq": (awq, dict(quant_method="awq", bits=4, group_size=GROUP, version="gemm")),
}
