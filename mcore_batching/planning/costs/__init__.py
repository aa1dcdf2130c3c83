"""Costs of passes (`cost`), and of the layers that a model's config names."""
