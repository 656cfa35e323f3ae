"""The same cores under a virtual clock. Empty of logic as yet; it may import every room but launch."""
