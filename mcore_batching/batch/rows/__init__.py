"""Rows: samples packed one behind another (`packed` has a drawing), and placeholders."""
