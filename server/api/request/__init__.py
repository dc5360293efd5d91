"""Request bodies: decoding, checking, and the generation requests that they ask for."""
