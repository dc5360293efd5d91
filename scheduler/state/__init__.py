"""State of the scheduler: request records, queues, tables of peers and tickets, deadlines, metrics."""
