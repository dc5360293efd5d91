"""What the scheduler measures: metrics, durations, and its part of traces."""
