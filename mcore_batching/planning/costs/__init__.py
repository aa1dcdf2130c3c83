"""Costs of passes, and of the layers that a model's config names."""
