"""Packed documents: balanced layouts, and exchanges of only the rows that a query sees."""
