"""Tests of neurond."""
