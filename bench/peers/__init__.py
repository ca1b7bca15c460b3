"""The same work by other packages, in one run with ours."""
