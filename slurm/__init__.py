"""Jobs of the Slurm scheduler."""
