"""A rank's micro-batches: the schedule that was planned, and its rows made ready for the model."""
