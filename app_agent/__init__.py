"""App agents: value GPUs, bid, divide what was won; and the library that training scripts import."""
