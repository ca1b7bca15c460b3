"""Single-device modules; none depends on ranks, process groups or environment variables."""
