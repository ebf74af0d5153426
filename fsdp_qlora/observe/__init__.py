"""What a run shows of itself: metrics, held-out loss, profiles, where its memory goes.

Modules, each importing only from those before it: clock, compilations, metrics, sinks, pace, runlog,
trackers, loss_picture, evaluate, samples, peaks, memory_timeline, memory_report, trace, profiling.
"""
