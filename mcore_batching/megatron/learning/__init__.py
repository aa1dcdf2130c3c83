"""Costs of passes, learnt while training runs."""
