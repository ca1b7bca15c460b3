"""Tensor and sequence parallelism, as DTensors."""
