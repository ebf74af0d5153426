"""A transformers `Trainer`, or any subclass of it, on this engine.

    class Sharded(ShardedTrainerMixin, SomeTrainer): ...

The trainer makes its own adapters, data and losses. In between, when its adapters exist and before it
makes an optimizer, the model is sharded and, if it is given by name, each rank streams its own rows of
the weights and quantizes them. accelerate's wrapping is skipped; checkpoints hold adapters or weights
in their usual files, and each rank's rows of the optimizer's states as our own checkpoints do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from ..adapters import apply_fp8
from ..build import compile_blocks
from ..choices import POLICIES, FormatName, StrategyName, strategy_named
from ..config import block_policies
from ..memory.activation_offload import apply_activation_offload
from ..memory.checkpointing_policy import apply_activation_policy
from ..memory.tiled_mlp import apply_tiled_mlp
from ..model.attention_kernels import apply_attention_tiles
from ..model.blocks import decoder_blocks
from ..observe.compilations import say_what_runs_eager
from ..optim import CompactAdamW
from ..sharding import OnHost, free_gathered, is_sharded
from ..training.step import clip_gradients
from .arguments import (
    EIGHT_BIT,
    check_accelerator,
    check_arguments,
    check_copied,
    check_given,
    check_method,
    check_trained,
)
from .checkpoints import CheckpointMixin
from .peft import register_with_peft
from .reference_pass import compute_as_trained
from .streamed import shard_and_load, streamed_model


class ShardedTrainerMixin(CheckpointMixin):
    """What a `Trainer` needs to train on this engine; put it before the trainer's class.

    model: a folder or hub name, whose weights each rank streams by rows into its own shards, or a
    model that exists on every rank. quant: the format of frozen weights of a model given by name
    (nf4, fp4, int8, hqq4..., none). sharding_strategy: ddp, shard_grad_op, full_shard or a hybrid of
    them. activation_policy: as --activation_policy; None recomputes blocks where the trainer's
    gradient_checkpointing is on. mlp_tiles, attention_tiles: as the flags, for long rows. compile:
    torch.compile each block, for rows of any length. compute_dtype: "fp8" multiplies frozen weights in
    fp8. use_cpu_offload: frozen weights wait in host memory, but for the embedding and head where the
    trainer reads the head itself, as TRL's do. use_activation_cpu_offload: what recomputed
    blocks keep, their inputs and under keep_attention attention's outputs, waits there for the backward.
    padding_free: compute the rows of a batch without their padding, where that is exact; TRL's own setting
    of this name may be on beside it.
    Raises ValueError for settings of the trainer that would wrap the model a second time.
    """

    _auto_class: type = AutoModelForCausalLM  # of a model given by name
    _labels: dict = {}  # noqa: RUF012  what its configuration says besides
    # The trainer has a reference policy: a copy of the adapter a model comes with.
    _copies_adapter = False
    # It has a second model for that where all weights are trained, and takes one as `ref_model`.
    _takes_reference = False
    # The trainer multiplies with the head's weight itself, where it lies.
    _reads_head = False

    def __init__(
        self,
        model: str | Path | nn.Module,
        *args: Any,
        sharding_strategy: StrategyName = "full_shard",
        quant: FormatName | Literal["none"] = "nf4",
        shard_group_size: int = -1,
        wrap_policy: str = "block",
        activation_policy: str | None = None,
        mlp_tiles: int = 1,
        attention_tiles: int = 1,
        compile: bool = False,
        compute_dtype: Literal["bf16", "fp8"] = "bf16",
        use_cpu_offload: bool = False,
        use_activation_cpu_offload: bool = False,
        padding_free: bool = True,
        **kwargs: Any,
    ):
        register_with_peft()
        check_given(kwargs)
        if kwargs.get("peft_config") is not None:
            check_method(kwargs["peft_config"], model)
        self._shards = strategy_named(sharding_strategy).shards
        self._sharding = dict(
            sharding_strategy=sharding_strategy,
            shard_group_size=shard_group_size,
            wrap_policy=wrap_policy,
            padding_free=padding_free,
        )
        if isinstance(model, (str, Path)):
            name = str(model)
            model = streamed_model(name, quant, auto_class=self._auto_class, **self._labels)
            if self._takes_reference and quant == "none" and not kwargs.get("peft_config"):
                kwargs["ref_model"] = kwargs.get("ref_model") or streamed_model(name, quant)
        elif self._copies_adapter and kwargs.get("ref_model") is None:
            check_copied(model)
        super().__init__(model, *args, **kwargs)
        if self.train_dataset is not None:
            check_trained(self.model)
        if compute_dtype not in ("bf16", "fp8"):
            raise ValueError(f"compute_dtype={compute_dtype!r}: use bf16 or fp8")
        on_host = OnHost(use_cpu_offload, False, use_cpu_offload and not self._reads_head)
        if compute_dtype == "fp8":
            apply_fp8(self.model, self.args.device)
        policies = self._apply_activation_policy(activation_policy, mlp_tiles, attention_tiles)
        if compile:
            compile_blocks(self.model, dynamic=True)
            compute_as_trained(self.model)
            self.add_callback(_SaysWhatRunsEager())
        if use_activation_cpu_offload:
            _check_recomputes(policies)
            apply_activation_offload(self.model, policies)
        shard_and_load(
            self.model,
            self.args.device,
            seed=self.args.seed,
            on_host=on_host,
            **self._sharding,
        )

    def _apply_activation_policy(
        self, policy: str | None, mlp_tiles: int, attention_tiles: int
    ) -> list[str]:
        """Recompute as our policies do where the trainer would by transformers' own checkpointing.

        Returns each block's policy.
        """
        if policy is None:
            policy = "recompute_all" if self.args.gradient_checkpointing else "keep_all"
        self.args.gradient_checkpointing = False
        self.model.config.use_cache = False
        policies = block_policies(policy, len(decoder_blocks(self.model)))
        apply_tiled_mlp(self.model, mlp_tiles, policies)
        apply_attention_tiles(self.model, attention_tiles, policies)
        apply_activation_policy(self.model, policies)
        return policies

    # ---- what the trainer does itself, but not to a sharded model --------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Where a trainer knows its arguments, before it does anything with the model."""
        check_arguments(self.args, self.model, self._shards)
        super().create_accelerator_and_postprocess()
        check_accelerator(self.accelerator)
        self.accelerator.prepare_model = partial(self._prepared, self.accelerator.prepare_model)

    def _prepared(
        self, prepare: Callable, model: nn.Module, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """What accelerate makes of a model; a reference of its own is sharded as the policy is."""
        prepared = getattr(model, "_is_accelerate_prepared", False)
        if model is not getattr(self, "ref_model", None) or prepared:
            return prepare(model, *args, **kwargs)
        model.requires_grad_(False)
        return shard_and_load(model, self.args.device, **self._sharding).eval()

    def _move_model_to_device(self, model: nn.Module, device: torch.device):
        """Weights on meta have none yet, and sharded ones are where they belong."""
        on_meta = any(p.is_meta for p in model.parameters())
        if not on_meta and not any(is_sharded(m) for m in model.modules()):
            super()._move_model_to_device(model, device)

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> AbstractContextManager:
        return self._autocast(cache_enabled)

    def compute_loss_context_manager(self) -> AbstractContextManager:
        return self._autocast()

    def _autocast(self, cache_enabled: bool | None = True) -> AbstractContextManager:
        """What accelerate does when it wraps; weights that are stored in 16 bits need none."""
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        if dtype is None or self.model.dtype == dtype:
            return nullcontext()
        return torch.autocast(self.args.device.type, dtype, cache_enabled=bool(cache_enabled))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        # A forward without a backward leaves copies in the place of shards.
        free_gathered(self.model)
        given = self.args
        if self.optimizer is None and given.optim in EIGHT_BIT:
            self.optimizer_cls_and_kwargs = self.optimizer_cls_and_kwargs or (
                CompactAdamW,
                dict(
                    state_dtype="8bit",
                    lr=given.learning_rate,
                    betas=(given.adam_beta1, given.adam_beta2),
                    eps=given.adam_epsilon,
                ),
            )
        return super().create_optimizer(model)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self._gradient_norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm=None) -> float:
        return (self._gradient_norm(None) if grad_norm is None else grad_norm).item()

    def _gradient_norm(self, max_norm: float | None) -> torch.Tensor:
        """The norm of gradients as they are without fp16's loss scale, clipped to `max_norm` if given."""
        self.accelerator.unscale_gradients()
        return clip_gradients(self._trained(), max_norm)

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]


class ShardedTrainer(ShardedTrainerMixin, Trainer):
    """transformers' own `Trainer` on this engine; `peft_config` adapts the model first."""

    def __init__(
        self,
        model: str | Path | nn.Module,
        *args: Any,
        peft_config: PeftConfig | None = None,
        **kwargs: Any,
    ):
        if peft_config is not None:
            check_method(peft_config, model)
        if isinstance(model, (str, Path)):
            model = streamed_model(str(model), kwargs.get("quant", "nf4"))
        if peft_config is not None:
            register_with_peft()
            model = get_peft_model(model, peft_config)
        super().__init__(model, *args, **kwargs)


class _SaysWhatRunsEager(TrainerCallback):
    """Prints what torch.compile left out, once."""

    def on_step_end(self, args, state, control, **kwargs):
        say_what_runs_eager()


def _check_recomputes(policies: list[str]):
    """Only what a block starts its recomputation from can leave the GPU."""
    if not any(POLICIES[policy].recomputes for policy in policies):
        raise ValueError(
            "use_activation_cpu_offload=True offloads the inputs of recomputed blocks, and no block is "
            "recomputed; give activation_policy='recompute_all'"
        )
