"""Programs beside training: prepare, sample, plan, plot, vendor."""
