"""A Lightning Fabric strategy: `Fabric(strategy=ShardedStrategy("full_shard"))`.

`fabric.setup` shards the model and, where `streamed_model` made it, fills each rank's shards from the
files. Set the optimizer up afterwards, with the model's trained parameters.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from typing_extensions import override

from ..choices import StrategyName
from .streamed import shard_and_load


class ShardedStrategy(ModelParallelStrategy):
    """Fabric's strategy for a model whose parallelism is ours.

    sharding_strategy: ddp, shard_grad_op, full_shard or a hybrid of them. seed: of freshly initialised
    adapters. settings: padding_free, and what `apply_sharding` takes (wrap_policy, on_host...).
    """

    def __init__(
        self, sharding_strategy: StrategyName = "full_shard", seed: int = 0, **settings: Any
    ):
        self._given = dict(sharding_strategy=sharding_strategy, seed=seed, **settings)
        super().__init__(self._sharded, tensor_parallel_size=1)

    @override
    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_processes * self.num_nodes
        super().setup_environment()

    def _sharded(self, model: nn.Module, mesh) -> nn.Module:
        return shard_and_load(model, self.root_device, **self._given)

    @override
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self._check_split("fabric.save")
        super().save_checkpoint(*args, **kwargs)

    @override
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._check_split("fabric.load")
        return super().load_checkpoint(*args, **kwargs)

    def _check_split(self, call: str):
        """Lightning would say that no model was set up."""
        if self._given["sharding_strategy"] == "ddp" or self.num_processes * self.num_nodes == 1:
            raise ValueError(
                f"{call}: it holds models in shards, and under ddp or on one rank this one is whole; call "
                "save_trained(model.module, folder) on every rank, or give another sharding_strategy"
            )
