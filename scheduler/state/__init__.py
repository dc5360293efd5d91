"""The state of one scheduler: replicas, plans in flight, and the tables that its parts share."""
