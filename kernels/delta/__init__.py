"""The gated delta rule, computed in chunks of tokens."""
