"""Predict a run's time and memory on a cluster, and search for its fastest arrangement.

There are two models of a step. Formulas (step_cost.py, step_memory.py, layers/) take milliseconds,
so thousands of arrangements can be compared. A rehearsal (rehearsal.py) runs the training code of
one rank on tensors without memory: it takes seconds, and shows what the formulas may miss. Tests
compare the formulas with rehearsals, and rehearsals with real steps.

Attention, most of the work of a long sequence, is counted and not estimated: its pairs of queries
and keys, its rounds and the bytes to each peer come from the plan that training executes
(parallel/context/plan.py), so a change to a method changes its prediction too. Only the rates are
assumed: they come from a cluster file. Ranks wait for each other in every round and collective, so
the slowest rank or the busiest link decides how long each takes, and not the mean.

Diffusion transformers of diffusers are read from their config.json. Each class is described by its
forward pass on symbols, which are tensors without elements (planner/diffusion).

The search needs only the order of the arrangements, and an error that all of them share does not
change it.
"""
