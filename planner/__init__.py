"""Predict a run's time and memory on a cluster, and search for its fastest arrangement."""
