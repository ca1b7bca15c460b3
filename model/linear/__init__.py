"""Layers whose attention keeps a state of constant size, and the models that are made of them alone."""
