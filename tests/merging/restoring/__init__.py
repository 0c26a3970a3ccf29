"""Tests of restorers."""
