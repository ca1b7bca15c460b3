"""Submit and run jobs of the Slurm scheduler."""
