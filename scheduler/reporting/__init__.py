"""What the scheduler tells on demand: statistics, status, traces."""
