"""The choice of a prefill server: loads, who holds which prefix, and what to do when one fails."""
