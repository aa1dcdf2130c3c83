"""Pictures of plans and of recorded steps."""
