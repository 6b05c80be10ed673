"""Tests of containers."""
