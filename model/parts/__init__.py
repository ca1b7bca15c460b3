"""Parts of which families build their layers: attention, norms, feed-forwards, positions, adapters."""
