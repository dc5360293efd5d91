"""Building blocks of processes: clocks, event loops, message framing, back-off, process set-up."""
