"""The optimizer, its rates and their schedule."""

from __future__ import annotations

from dataclasses import dataclass

from ...choices import OPTIMIZERS
from ...choices.optimizers import names_where
from .. import without_effect as rules
from ..settings import AUTO, DEFINES_WEIGHTS, MUST_MATCH, one_of, opt


@dataclass(kw_only=True)
class OptimizerOptions:
    """Optimizer"""

    optimizer: str = opt(
        "adamw",
        "optimizer of the trained weights; adamw_bf16 and adamw_8bit have smaller states and "
        "round bf16 weights stochastically, for full fine-tuning",
        choices=tuple(OPTIMIZERS),
        on_resume=DEFINES_WEIGHTS,
    )
    lr: float | None = opt(
        None,
        "peak learning rate; left out = 1.4 / hidden size for adapters (3.4e-4 at 4,096), and a tenth "
        "of that where whole weights are trained",
        example=2e-4,
        on_resume=MUST_MATCH,
        least=0,
    )
    wd: float = opt(
        0.0,
        "weight decay of the adamw optimizers",
        on_resume=MUST_MATCH,
        least=0,
        no_effect=rules.needs(
            f"--optimizer {one_of(names_where('decays'))}", lambda c: OPTIMIZERS[c.optimizer].decays
        ),
    )
    lr_scheduler: str | None = opt(
        None,
        "learning rate schedule; linear and cosine warm up, and cosine ends at a tenth of the "
        "peak; left out = cosine, or constant for a --stream without --max_steps",
        choices=("constant", "linear", "cosine"),
        on_resume=MUST_MATCH,
    )
    warmup_share: float = opt(
        0.03,
        "warmup of linear and cosine",
        unit="share of all steps",
        on_resume=MUST_MATCH,
        no_effect=rules.needs(
            "--lr_scheduler linear or cosine", lambda c: c.schedule != "constant"
        ),
    )
    lr_warmup_steps: int = opt(
        AUTO,
        "warmup steps of any schedule; -1 = from --warmup_share",
        unit="steps",
        example=100,
        on_resume=MUST_MATCH,
    )
    apply_gradient_clipping: bool = opt(True, "clip gradients to --grad_norm", on_resume=MUST_MATCH)
    grad_norm: float = opt(
        1.0,
        "maximum norm of all gradients together; larger ones are scaled down to it",
        on_resume=MUST_MATCH,
        no_effect=rules.needs("--apply_gradient_clipping", lambda c: c.apply_gradient_clipping),
    )
    router_aux_loss_coef: float = opt(
        0.0,
        "add this much of a mixture's load-balancing loss, as transformers computes it, to the "
        "training loss; 0 adds none, whatever the model's config.json says",
        example=0.001,
        on_resume=MUST_MATCH,
        least=0,
    )
