"""A zoo: small random models of the architectures that people serve."""
