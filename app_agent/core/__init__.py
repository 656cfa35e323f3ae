"""The app agent without hands: it decides and can do nothing."""
