"""Costs of passes, learnt from the times of a job's own.

learnt_costs  the passes' times as sums that ranks add up, and the costs that follow from them
ridge         ridge regression that `learnt_costs` fits by
"""
