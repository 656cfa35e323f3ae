"""What runs inside a training process; needs the standard library only."""
