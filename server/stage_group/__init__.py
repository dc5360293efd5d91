"""External stages: how they find their rank, join the scheduler, and how the scheduler admits them."""
