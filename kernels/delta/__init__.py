"""The gated delta rule, token by token and in chunks."""
