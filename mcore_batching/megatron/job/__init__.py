"""The training job: its settings, process groups, agreement between ranks, and their watch."""
