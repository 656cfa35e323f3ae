"""Nodes and apps: how they enrol, speak, buy, act and leave."""
