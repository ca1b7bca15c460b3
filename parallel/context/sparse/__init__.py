"""Packed documents: only rows that a query sees travel."""
