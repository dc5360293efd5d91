"""Tool calls in generated text: how model families write them, reading them as they come, and forcing them."""
