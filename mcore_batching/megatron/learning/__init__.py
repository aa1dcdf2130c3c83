"""What passes cost, learnt while training runs."""
