"""What this server says of itself: readiness, statistics, status."""
