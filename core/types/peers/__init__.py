"""Where other servers are, and which of them may be connected to."""
