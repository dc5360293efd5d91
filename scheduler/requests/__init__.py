"""Requests: their records, the table of those that have not ended, their transfers."""
