"""What a GPU's rates become in a step: every constant of the estimates that measurements have set.

Rates themselves are the card's (`catalog/known_gpus.py`, `fsdp-qlora calibrate`); these say how much of
them a step reaches, and what the host and the allocator add. They come from the rows that
`bench/accuracy.py` names in CALIBRATED_ON; `python scripts/fit_constants.py` sets them anew and prints
the errors on all other rows.
"""

from __future__ import annotations

# ---- products and passes -----------------------------------------------------------------------
FP32_RATE = 1 / 16  # of bf16's rate: without tensor cores
MATMUL_SHARE = 0.92  # of the rate of large products, for a block's linear layers
FP8_SHARE = 0.824  # the same in fp8, without the quantization that they need
ATTENTION_SHARE = (
    0.752  # of the same rate for attention over long rows, forward and backward together
)
ATTENTION_RAMP = (
    840  # tokens: rows of this length reach half of it (benchmarks/attention.py, cuDNN)
)
# Tokens: rows of this length would take twice the time. Rows of 131,072 tokens are as fast as short ones,
# 4 heads over 1,048,576 take 6% longer (benchmarks/one_rank.py, cuDNN, an H200).
ATTENTION_FADE = 16.7e6
# Time of other kernels than cuDNN's, by the medians over rows of one length of benchmarks/attention.py.
# FlashAttention 4's: 6.50 ms, packed 6.85, where cuDNN takes 7.24 (2x8192, heads of 128, an H200).
ATTENTION_TIME = {
    "varlen": 1.7,
    "torch_fa": 1.7,
    "torch_fa_packed": 1.7,
    "flash_attention_2": 1.65,
    # gpt-oss's own code, its scores kept: set on 2x2048 of an H200 (models_h200_2026-11-29.jsonl).
    "eager": 27.0,
    "flex_attention": 1.46,
    "fa4": 0.9,
    "fa4_packed": 0.95,
}
COPY_SHARE = 1.03  # passes over activations move at this share of a copy's rate
RANK_SHARE = 0.914  # the same for products of rank R, which only read
# Of experts, whose kernel multiplies 128 columns where R are wanted: between adapted and frozen experts of
# 30B-A3B, 0.255 in bf16 and 0.227 in fp8 (mixtures_h200_2026-11-29.jsonl). No profile of it yet.
GROUPED_RANK_SHARE = 0.24
UNPACK_SHARE = 0.632  # the same for 4-bit weights unpacked to 16 bits,
MERGE_SHARE = 0.358  # with the adapter added on the way,
FP8_UNPACK_SHARE = 0.529  # or written as fp8

# ---- sharding ----------------------------------------------------------------------------------
# What a gather costs although it is hidden: mostly that products beside a collective lack the
# multiprocessors which it holds, also while it waits for another rank; less, that gathered bytes are
# copied out of a flat buffer (a profile in docs/LOG.md). Set on rows of four H100s; on H200s blocks of
# 0.14 GB cost this, and blocks of 0.52 GB a third of it: not in proportion to the bytes. Ranks whose graphs
# are replayed wait less for each other: set between 7B (0.20 would be right), 30B-A3B (0.20) and padded
# rows of 8B (0.12) on two H200s.
GATHER_SHARE = 0.121  # of a copy's rate, for the bytes of a gathered unit, read and written,
REPLAYED_GATHER_SHARE = 0.17  # and of one that is replayed
COLLECTIVE_LATENCY = 30e-6  # seconds
# A ring over several machines takes longer by its hops: NCCL's own figures for its Simple protocol
# (hwLat in src/graph/tuning.cc, NCCL 2.18). Not measured here.
NETWORK_HOP, NVLINK_HOP = 14e-6, 3.4e-6  # seconds

# ---- mixtures -----------------------------------------------------------------------------------
# Of a block's forward: top-k, sorting and some forty kernels of microseconds each, which took 19 of 597 ms
# in 96 forwards of one profile (Qwen3-30B-A3B with adapters on experts, every block recomputed, an H200).
ROUTING_SECONDS = 0.0002

# ---- mixers with a state -----------------------------------------------------------------------
# Not measured yet: counted from the kernels of flash-linear-attention and mamba-ssm.
STATE_CHUNK = 64  # tokens whose attention within the chunk is kept, per token and head

# Of a delta net on plain torch (model/delta_rule.py), in values of 4 bytes per token and head, traced: rows
# of a chunk, values of a head's size, more where decays are by channel, and states, one for each chunk.
TORCH_RULE_HELD = (8.5, 16.3, 53.9, 2.9)  # by its backward at most
TORCH_RULE_FORWARD = (32.7, 34.4, 278, 7.7)  # read and written, but for norms,
TORCH_RULE_BACKWARD = (99, 103, 1035, 22)  # which makes its chunks again
# Traced: operations of a forward and a backward, beside those of the loop over chunks; decays by head, and by
# channel.
TORCH_RULE_LAUNCHES = (66, 150), (155, 466)
TORCH_LAUNCH = 8e-6  # seconds of the host for one of these; not measured on a GPU's host
# Of a product in the loop, however small: a head's of 128 x 128 x 128 in fp32, on one multiprocessor, counted
# by its rate. Not measured.
TORCH_STEP_SECONDS = 10e-6
# What the rule as a whole reaches of what is counted. Set on the only row there is, which an earlier op gave
# (qwen3_5_9b_qlora on 1, models_h200_2026-11-30.jsonl): 0.53 s of its step are beyond what other layers take,
# and its bytes, products and steps count for 0.39. That op also solved triangular systems by cuBLAS, which
# today's does not, and no profile says how long that took: the op may be faster than estimated.
TORCH_RULE_SHARE = 0.73
# Of Mamba 2 on plain torch (model/state_space_scan.py), traced, in values of 4 bytes per token and head: a
# row of a chunk, values of a head, a state for each chunk, and a group's keys for each head that shares them.
SCAN_CHUNK = 128  # tokens
SCAN_PART = 2**17  # tokens times heads at once
SCAN_HELD = (3.1, 7.1, 2.0, 2.3)  # by a part's backward at most
SCAN_FORWARD = (10.3, 23.4, 1.0, 11.6)  # read and written,
SCAN_BACKWARD = (25.0, 75.3, 8.9, 49)  # which makes its chunks again
SCAN_LAUNCHES = (33, 118)  # of a part's forward and backward, beside its loop over chunks
# Of lightning attention (lightning.py), in values of the compute dtype per token: a row of a chunk for each
# head, values of all heads, a state for each chunk, and values of all heads for each chunk of a row.
LIGHTNING_HELD = 8.2  # by its backward, in values of all heads
LIGHTNING_FORWARD = (4.8, 55.2, 7.6, 0)  # read and written
LIGHTNING_BACKWARD = (6.6, 90.2, 7.2, 12.4)
LIGHTNING_LAUNCHES = (18, 13), (10, 22)  # once and for each chunk, of a forward and a backward
# More of several rows, whose chunks are copied for products: values of all heads, and launches of a chunk.
LIGHTNING_COPIES, LIGHTNING_COPY_LAUNCHES = (10.5, 2), (6, 2)
STATE_PASSES = (
    6  # of what a mixer convolves, read or written by a forward; a backward twice as many
)

# ---- the host ----------------------------------------------------------------------------------
# Seconds in which the CPU launches a third of a block's forward and backward.
COMPILED_LAUNCH = 0.00126
EAGER_LAUNCH = 0.00263
ADAPTER_LAUNCH = 7.14e-05  # more for each adapted layer,
UNPACK_LAUNCH = 0.000325  # where weights are in few bits,
FP8_LAUNCH = 0.000345  # and in fp8
# And in a mixture in fp8, where each grouped product quantizes its rows and weights apart: set on 30B-A3B
# with adapters on experts, launched on one GPU. In bf16 two rows of two GPUs, on hosts that differ by a
# fifth, know nothing beyond the adapters.
EXPERTS_FP8_LAUNCH = 0.0018
RECOMPUTE_LAUNCH = 2.83  # of that third, to run a block again, hooks of checkpointing included;
RERUN_LAUNCH = 0.3  # or only what keep_linears leaves out
SHARDED_LAUNCH = 0.000172  # FSDP's hooks, per tensor of a block and gather
STEP_SECONDS = 0.00513  # the GPU waits at a step's start and end
OPTIMIZER_LAUNCH = 0.00069  # of an update by an optimizer that is written here (optim/)
HOST_OPTIMIZER_PER_SECOND = 0.9e9  # weights per second and rank that the host's Adam updates

# ---- the allocator -----------------------------------------------------------------------------
# Reserved but not used at the peak: holes that tensors leave which come and go. What stays between them
# keeps holes apart, so it matters what blocks keep. Shares of what is in use in a block or the loss,
SLACK_KEPT = 1.58  # where blocks keep more than their input,
SLACK_INPUTS = 1.2  # where they keep that,
SLACK_MOVED = 0.311  # and where it waits on the host.
SLACK_GATHERED = 1.05  # of what FSDP has gathered and frees; the two at the moment of the most
# Of the widest weight that a block's experts unpack in fp8, once a block: what it kept lies in the hole that
# the weight left, and a graph's memory starts empty. Adapted 0.97, frozen 1.04 of it (30B-A3B, an H200).
HOLES_OF_GRAPHS = 1.0

CONTEXT_GIB = 0.5  # CUDA context and kernels
NCCL_GIB = 0.4  # buffers of one NCCL communicator, where there are several ranks
PROCESS_HOST_GIB = 1.5  # Python, torch and its libraries, per rank
