"""What a run shows of itself: metrics, held-out loss, profiles, where its memory goes.

Modules, each importing only from those before it: startup, device_timer, compilations, metrics, sinks,
throughput, runlog, trackers, loss_plot, evaluate, eval_command, samples, peak_memory, memory_timeline,
memory_report, trace, profiling.
"""
