"""Ranked plans as a page: pictures, tables and commands in one HTML file."""
