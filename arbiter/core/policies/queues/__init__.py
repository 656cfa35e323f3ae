"""Policies that serve apps in one order."""
