"""The plan as a picture: one HTML page without scripts, server or network."""
