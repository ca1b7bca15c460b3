"""Convert conversations to tokens, with a loss mask that selects the assistant's turns."""
