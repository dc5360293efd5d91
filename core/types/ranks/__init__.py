"""How the ranks of a server are laid out, and what replicas agree on."""
