"""The search for the micro-batches whose step ends first."""
