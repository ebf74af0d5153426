"""Bytes, seconds and money of a run, from the model's shape and the settings alone. Pure: no torch.

Memory follows the code, tensor by tensor: what a block saves for its backward, what its backward
holds at its widest place, which units FSDP2 has gathered at that moment. The peak is the largest of
a few moments of a step, and the table shows what is alive then. Nothing is fitted but what
`constants.py` names; each says what it stands for.

Time is counted in the same way: FLOPs over the rate of large products, bytes over the rate of
copies, transfers less what compute hides.

Modules, each importing only from those before it: constants, attention, lengths, kinds, delta_nets,
mamba2, lightning, mixers, experts, stored_weight, fp8_weights, weights, vocabulary, collectives,
magnitudes, activations, kept, flops, gathered_units, end_of_backward, peak, memory_traffic, compute,
transfers, speed, policies, resolve, cost, question, failures, report, tasks.

Letters: B batch, T tokens of a row, N = B T, D hidden, I intermediate, q and kv the widths of all
query and all key-value heads, V vocabulary, R rank, n ranks that share one copy of the weights.
"""

from .activations import kept_by_block, loss_bytes, saved_by_block
from .cost import RunCost, owned_cost, run_cost
from .failures import Failures, best_interval, failures
from .flops import Flops, flops_per_token, model_flops_per_token, model_tflops
from .lengths import Batches, Rows, batches_of, packing_gain, packing_line, with_longest_row
from .peak import GIB, Memory, Peak, host_memory, memory
from .policies import choose_policies, keeps_fp8_weights
from .question import Estimate, estimate
from .report import as_json, report
from .resolve import Room, leaves_open, resolve, room_of
from .speed import StepTime, step_seconds
from .stored_weight import Weight
from .tasks import TASKS, Task
from .weights import block_weights, gathered, optimizer_bytes, resident_bytes

__all__ = [
    "GIB",
    "TASKS",
    "Batches",
    "Estimate",
    "Failures",
    "Flops",
    "Memory",
    "Peak",
    "Rows",
    "Room",
    "RunCost",
    "StepTime",
    "Task",
    "Weight",
    "as_json",
    "batches_of",
    "best_interval",
    "block_weights",
    "choose_policies",
    "estimate",
    "failures",
    "flops_per_token",
    "gathered",
    "host_memory",
    "keeps_fp8_weights",
    "kept_by_block",
    "leaves_open",
    "loss_bytes",
    "memory",
    "model_flops_per_token",
    "model_tflops",
    "optimizer_bytes",
    "owned_cost",
    "packing_gain",
    "packing_line",
    "report",
    "resident_bytes",
    "resolve",
    "room_of",
    "run_cost",
    "saved_by_block",
    "step_seconds",
    "with_longest_row",
]
