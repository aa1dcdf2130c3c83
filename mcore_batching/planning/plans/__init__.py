"""Plans: what they hold, their JSON, checks, figures and records, and the memory they take.

plan              the plans of a step and of a batch, as frozen data plan_document     their JSON,
and its digest validation        a plan checked against the invariants statistics        a plan's
fill, balance and predicted time shard_statistics  the same where each rank knows only its own
samples memory            memory that a plan needs on a rank records           a job's steps with
predicted and measured times files             files written whole, or left as they were
"""
