"""Tests of the packages."""
