"""Peer library: the decode side of the transfer protocol; one thread fetches KV into a staging area."""
