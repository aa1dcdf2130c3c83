"""Costs of passes, learnt from the times of a job's own."""
