"""The servers that KV goes to and comes from: their tables, tickets, and what they have not acknowledged."""
