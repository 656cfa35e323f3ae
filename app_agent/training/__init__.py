"""The part of the app agent inside a training process; it needs the standard library only."""
