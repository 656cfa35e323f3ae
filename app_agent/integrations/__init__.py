"""Bridges to training frameworks."""
