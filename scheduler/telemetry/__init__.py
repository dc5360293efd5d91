"""Statistics snapshots and trace recording."""
