"""Predict a run's time and memory on a cluster, and search for its fastest arrangement.

There are two models of a step. Formulas (step_cost.py, step_memory.py, layers/) take milliseconds,
so that thousands of arrangements can be compared. A rehearsal (rehearsal.py) runs the training code
of one rank on tensors without memory: it takes seconds, and shows what the formulas may miss. Tests
hold the formulas to rehearsals, and rehearsals to real steps.

Attention, most of the work of a long sequence, is counted and not estimated: its pairs of queries
and keys, its rounds and the bytes to each peer come from the plan that training executes
(parallel/context/plan.py), so that a change of a method changes its prediction too. Only rates are
assumed, those of a cluster file. Ranks wait for each other in every round and collective, so that
the slowest rank or the busiest link counts there, and not the mean.

An error that all arrangements share does not change their order: a choice needs ratios only.
"""
