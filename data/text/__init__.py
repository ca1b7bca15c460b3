"""Prepare documents as Megatron's .bin and .idx files, and read training samples from these."""
