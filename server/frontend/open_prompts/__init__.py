"""Open prompts: prompts that grow before they are committed, and whose beginning is computed meanwhile."""
