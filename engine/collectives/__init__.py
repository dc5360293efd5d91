"""Collective operations among the ranks of a group, behind one interface."""
