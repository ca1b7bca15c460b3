"""Files, errors of all ranks and processes, for every folder."""
