"""TRL's trainers on this engine: SFT, DPO, KTO, GRPO and reward models.

Give `peft_config` and the adapters are TRL's own. The reference policy of DPO, KTO and GRPO is then the
frozen base with its adapters off: no second model. Where all weights are trained there is one, sharded as
the policy is. TRL is an extra: pip install "fsdp_qlora[trl]".
"""

from __future__ import annotations

import trl
from transformers import AutoModelForSequenceClassification

from .transformers import ShardedTrainerMixin


class SFTTrainer(ShardedTrainerMixin, trl.SFTTrainer):
    """`trl.SFTTrainer`; see `ShardedTrainerMixin` for what it takes besides."""

    _reads_head = True


class DPOTrainer(ShardedTrainerMixin, trl.DPOTrainer):
    """`trl.DPOTrainer`; see `ShardedTrainerMixin` for what it takes besides."""

    _copies_adapter = _takes_reference = _reads_head = True


class KTOTrainer(ShardedTrainerMixin, trl.KTOTrainer):
    """`trl.KTOTrainer`; see `ShardedTrainerMixin` for what it takes besides."""

    _copies_adapter = _takes_reference = _reads_head = True


class GRPOTrainer(ShardedTrainerMixin, trl.GRPOTrainer):
    """`trl.GRPOTrainer`; see `ShardedTrainerMixin` for what it takes besides."""

    _copies_adapter = _reads_head = True


class RewardTrainer(ShardedTrainerMixin, trl.RewardTrainer):
    """`trl.RewardTrainer`; see `ShardedTrainerMixin` for what it takes besides."""

    _auto_class = AutoModelForSequenceClassification
    _labels = dict(num_labels=1)
