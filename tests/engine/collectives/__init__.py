"""Tests of collective operations."""
