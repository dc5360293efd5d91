"""KV going out: reservations of peers, sends, held requests."""
