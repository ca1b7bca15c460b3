"""Plain modules of one device; none knows a rank, a group or an environment variable."""
