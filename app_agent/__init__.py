"""App agents: value GPUs, bid, divide the GPUs won; and the library that training scripts import."""
