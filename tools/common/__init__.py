"""Code that the command-line programs share."""
