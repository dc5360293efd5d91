"""`headrace bake`: computes the KV of a prompt's prefix and writes it to a KV file, shows and verifies such files."""
