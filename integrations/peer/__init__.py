"""The decode side of the transfer protocol as a library: one thread that fetches tickets into a staging area."""
