"""The demo's training scripts, which users may start from: `plain.py`, and `digits.py`, the same with our lines."""
