"""Predicted cost of one attention layer: seconds, bytes sent and buffers."""
