"""Layers around every policy's : interactive apps, and guests on shared GPUs."""
