"""Tests of ranks on a cluster."""
