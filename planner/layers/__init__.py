"""Predicted cost of one layer's attention: seconds, bytes sent and buffers."""
