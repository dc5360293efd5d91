"""JSON Schema rewritten to what llguidance keeps to: read, joined, tried for values, written anew. Pure but for what is
asked of the library."""
