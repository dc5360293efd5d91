"""State of the scheduler: queues, plans, tables of peers and tickets, deadlines, metrics."""
