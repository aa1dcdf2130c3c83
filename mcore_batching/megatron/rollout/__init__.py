"""From rollout data on every rank to a plan that all share."""
