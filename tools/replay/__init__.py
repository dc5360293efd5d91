"""`headrace replay`: runs the scheduler over a recording: the same decisions again, explained, varied and drawn."""
