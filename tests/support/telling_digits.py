"""`launch/training/digits.py`, which also writes down every mini-batch it makes: ``telling_digits.py FILE [options]``.

One line ``PID STEP`` each, appended by a single write, so that all attempts of a job share the file. It shows from
outside, while nobody else can be asked, whether training goes on, and afterwards whether a step was lost or made twice.
"""

import os
import sys
import types

import torch

# The first optimizer of a process imports PyTorch's compiler, to say that it is not to be compiled. That takes as long
# as the rest of the start, and nothing here compiles.
torch._dynamo = sys.modules["torch._dynamo"] = types.ModuleType("torch._dynamo")
torch._dynamo.disable = lambda function, *_how, **_options: function
torch._dynamo.graph_break = lambda **_options: None

from launch.training import digits, plain  # noqa: E402

FILE = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


class ToldDigits(plain.Digits):
    def batch(self, step: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        os.write(FILE, f"{os.getpid()} {step}\n".encode())
        return super().batch(step, size, seed)


if __name__ == "__main__":
    plain.Digits = ToldDigits
    sys.exit(digits.main())
