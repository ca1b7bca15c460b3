"""Programs other than training: prepare, sample, plan, plot, vendor."""
