"""The ranks of a run: who they are, where they meet, what they send each other, and which rows each holds.

One rank is a world like any other: the same code runs with a group of one, so there is no second path to
keep right. Nothing else reads the launcher's variables or calls a collective over all ranks.

Modules, each importing only from those before it: ranks, store_connection, rank_store, groups, collectives,
sharded_tensors.
"""

from .collectives import (
    WriteError,
    all_gather_rows,
    all_reduce,
    broadcast,
    each_writes,
    from_main,
    from_rank,
    from_rank_in,
    gather_over_ranks,
    main_only,
    max_over_ranks,
    reduce_scatter_rows,
    sum_over_ranks,
)
from .groups import (
    broadcast_by_main,
    broadcast_error,
    hold_collectives,
    hybrid_mesh,
    main_device_type,
    open_rank_store,
    process_group,
    rendezvous,
    resolve_shard_group_size,
    serves_host,
    shard_mesh,
    simulated_world,
)
from .ranks import (
    Ranks,
    check_ranks,
    free_port,
    launched,
    print_main,
    rank_device,
    ranks_from_env,
    run_on_node,
)
from .sharded_tensors import full_tensor, is_first_copy, local_rows, split_as
from .store_connection import common_store

__all__ = [
    "Ranks",
    "WriteError",
    "all_gather_rows",
    "all_reduce",
    "broadcast",
    "broadcast_by_main",
    "broadcast_error",
    "check_ranks",
    "common_store",
    "each_writes",
    "free_port",
    "from_main",
    "from_rank",
    "from_rank_in",
    "full_tensor",
    "gather_over_ranks",
    "hold_collectives",
    "hybrid_mesh",
    "is_first_copy",
    "launched",
    "local_rows",
    "main_device_type",
    "main_only",
    "max_over_ranks",
    "open_rank_store",
    "print_main",
    "process_group",
    "rank_device",
    "ranks_from_env",
    "reduce_scatter_rows",
    "rendezvous",
    "resolve_shard_group_size",
    "run_on_node",
    "serves_host",
    "shard_mesh",
    "simulated_world",
    "split_as",
    "sum_over_ranks",
]
