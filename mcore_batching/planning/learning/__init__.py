"""Costs of passes, learnt from the times of a job's own.

learnt_costs  times of passes, and the costs that are known
fit           times as sums that ranks add up, and the costs that follow from them
"""
