"""Predicted time and memory of an arrangement, and the search for the fastest."""
