"""How requests end, and the integrity check of the state."""
