"""Which GPUs an app gets and who makes room: shared by policies and the layers around them."""
