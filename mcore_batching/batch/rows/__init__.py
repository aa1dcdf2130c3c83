"""Rows: samples packed one behind another, and placeholders."""
