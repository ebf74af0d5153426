"""What is sharded, recomputed, offloaded and compiled."""

from __future__ import annotations

from dataclasses import dataclass

from ...choices import POLICIES, STRATEGIES
from .. import without_effect as rules
from ..lists import policy_names
from ..settings import AUTO, MAY_CHANGE, opt


@dataclass(kw_only=True)
class ShardingOptions:
    """Sharding and memory"""

    sharding_strategy: str = opt(
        "full_shard",
        "what is sharded over GPUs and when it is gathered; auto = planned together with "
        "the settings not given, then confirmed by a probe",
        choices=(*STRATEGIES, "auto"),
        on_resume=MAY_CHANGE,
    )
    shard_group_size: int = opt(
        AUTO,
        "GPUs per shard group with the hybrid strategies; -1 = all GPUs of a node, or half "
        "of a single node's",
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
        no_effect=rules.needs("a hybrid --sharding_strategy", lambda c: c.strategy.is_hybrid),
    )
    sequence_parallel: int = opt(
        1,
        "GPUs that share the tokens of their rows, for rows too long for one: each computes every "
        "layer for its part, and attention for its part of the heads (Ulysses)",
        example=4,
        on_resume=MAY_CHANGE,
        least=1,
    )
    wrap_policy: str = opt(
        "block",
        "unit that FSDP gathers at once: a decoder block, its attention and MLP separately, "
        "or modules of at least --min_wrap_params",
        choices=("block", "attention_mlp", "min_params"),
        on_resume=MAY_CHANGE,
        no_effect=rules.of_gathering,
    )
    min_wrap_params: int = opt(
        100_000_000,
        "smallest unit with --wrap_policy min_params",
        on_resume=MAY_CHANGE,
        least=1,
        no_effect=rules.of_min_wrap_params,
    )
    backward_prefetch: str = opt(
        "backward_pre",
        "when the backward gathers the next unit: before the current unit's backward, after "
        "it (beside the reduction of its gradients), or only when needed",
        choices=("backward_pre", "backward_post", "none"),
        on_resume=MAY_CHANGE,
        no_effect=rules.of_gathering,
    )
    forward_prefetch: bool = opt(
        False,
        "gather the next unit before launching the current unit's forward; helps if the CPU "
        "is slow",
        on_resume=MAY_CHANGE,
        no_effect=rules.of_gathering,
    )
    gather_once: bool = opt(
        False,
        "keep gathered weights for all micro-batches of an optimizer step: less "
        "communication with accumulation, but every GPU holds the whole model",
        on_resume=MAY_CHANGE,
        no_effect=rules.of_gather_once,
    )
    use_gradient_checkpointing: bool = opt(
        True,
        "true = --activation_policy recompute_all, false = keep_all",
        on_resume=MAY_CHANGE,
        no_effect=rules.of_gradient_checkpointing,
    )
    activation_policy: str = opt(
        "auto",
        f"what each block keeps for the backward: {', '.join(POLICIES)}, or a number of blocks "
        "for each; auto = from --use_gradient_checkpointing",
        example="keep_linears:16,recompute_all:16",
        on_resume=MAY_CHANGE,
    )
    activation_budget_gib: float | None = opt(
        None,
        "GPU memory allocated by torch: chooses the fastest --activation_policy with a "
        "predicted peak within it; auto = all that the GPU has",
        unit="GiB",
        example=40,
        on_resume=MAY_CHANGE,
    )
    reentrant_checkpointing: bool = opt(
        False,
        "use torch's reentrant checkpointing, for old commands; no known benefit",
        on_resume=MAY_CHANGE,
        no_effect=rules.needs(
            "blocks that are recomputed", lambda c: policy_names(c) != {"keep_all"}
        ),
    )
    mlp_tiles: int = opt(
        1,
        "compute the MLP of recomputed blocks in this many tiles of tokens, one after the "
        "other (tiled MLP): less memory for long rows, but each tile dequantizes the "
        "weights again; -1 = as few as fit --activation_budget_gib, or as many as save much "
        "by the estimate",
        example=4,
        on_resume=MAY_CHANGE,
        least=1,
        or_auto=True,
        no_effect=rules.of_mlp_tiles,
    )
    use_cpu_offload: bool = opt(
        False, "keep the shards of frozen weights in host memory", on_resume=MAY_CHANGE
    )
    use_trained_cpu_offload: bool | None = opt(
        None,
        "with --use_cpu_offload, also offload trained weights, their gradients and "
        "optimizer states; None = if they take more than an eighth of the GPU",
        on_resume=MAY_CHANGE,
        no_effect=rules.needs("--use_cpu_offload", lambda c: c.use_cpu_offload),
    )
    use_vocabulary_cpu_offload: bool | None = opt(
        None,
        "keep frozen embeddings and lm_head in host memory; None = as --use_cpu_offload",
        on_resume=MAY_CHANGE,
    )
    use_activation_cpu_offload: bool = opt(
        False,
        "offload the inputs of recomputed blocks, and attention's outputs under keep_attention, to pinned "
        "host memory until their backward",
        on_resume=MAY_CHANGE,
    )
    no_sync: bool = opt(
        False,
        "reduce gradients only in the last micro-batch of a step: less communication, more memory",
        on_resume=MAY_CHANGE,
        no_effect=rules.of_no_sync,
    )
    compile: bool | None = opt(
        None,
        "compile each decoder block with torch.compile; None = on a GPU, unless --wrap_policy gathers parts "
        "of blocks",
        on_resume=MAY_CHANGE,
    )
    cuda_graphs: bool | None = opt(
        None,
        "replay the forward and backward of a micro-batch as a CUDA graph, much faster for "
        "few tokens, gathers and reductions included; None = up to 8,192 tokens a micro-batch, where "
        "nothing is offloaded, tiled or hybrid, and of sharded weights where the GPU would wait; true = "
        "also of hybrids and of sharded full weights",
        on_resume=MAY_CHANGE,
    )
    deterministic: bool = opt(
        False,
        "make repeated runs bit-identical on a GPU, at some cost in speed",
        on_resume=MAY_CHANGE,
        no_effect=rules.needs("a GPU", lambda c: c.device != "cpu"),
    )
