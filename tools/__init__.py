"""Programs besides training: prepare, sample, plan, plot, vendor."""
