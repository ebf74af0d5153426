"""What a run shows of itself: metrics, held-out loss, profiles, where its memory goes."""
