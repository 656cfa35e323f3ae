"""The shared language of arbiter, node agents and app agents; imports nothing of ours."""
