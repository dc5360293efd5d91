"""Tool calls in generated text."""
