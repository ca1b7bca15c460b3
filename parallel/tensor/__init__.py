"""Tensor and sequence parallelism, implemented with DTensors."""
