"""Headrace's own API."""
